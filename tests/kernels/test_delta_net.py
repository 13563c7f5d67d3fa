"""The gated delta-net: native kernels, the chunked reference and the definition agree."""

from collections.abc import Callable
from functools import cache

import pytest
import torch
from test_arguments import expect_refusals
from tiny_models import one_thread
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from vllm.ops import cpu_ops, torch_ops

FLOAT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Requests of one step: (tokens now, tokens before); one that starts has none before.
MIXED = ((1, 0), (7, 3), (33, 0), (1, 9), (17, 70), (1, 1))
SEVERAL_CHUNKS = ((1, 2), (70, 0), (65, 70))
# Sizes of a key and of a value head.
SIZES = ((128, 128), (24, 20), (1, 256), (40, 33))
NUM_SLOTS = 9


def requests(lengths=MIXED) -> dict[str, Tensor]:
    now = torch.tensor([0, *(now for now, _ in lengths)])
    return {
        "state_slots": torch.randperm(NUM_SLOTS)[: len(lengths)].int(),
        "query_start_loc": now.cumsum(0).int(),
        "seq_lens": torch.tensor([now + before for now, before in lengths]).int(),
    }


def delta_rule_case(key_dim=128, value_dim=128, dtype=torch.float32, lengths=MIXED):
    """Arguments as a layer gives them: views of one projection, two key heads for four."""
    num_tokens = sum(now for now, _ in lengths)
    qkv = torch.randn(num_tokens, 4 * key_dim + 4 * value_dim).to(dtype)
    q, k, v = qkv.split((2 * key_dim, 2 * key_dim, 4 * value_dim), 1)
    ba = torch.randn(num_tokens, 8).to(dtype)
    return {
        "query": q.unflatten(1, (2, key_dim)),
        "key": k.unflatten(1, (2, key_dim)),
        "value": v.unflatten(1, (4, value_dim)),
        "a": ba[:, 4:],
        "b": ba[:, :4],
        "decay_rate": torch.rand(4),
        "dt_bias": torch.randn(4),
        "state": torch.randn(NUM_SLOTS, 4, key_dim, value_dim),
        **requests(lengths),
    }


def conv_case(channels=300, taps=4, dtype=torch.float32, lengths=MIXED):
    num_tokens = sum(now for now, _ in lengths)
    return {
        "x": torch.randn(num_tokens, channels + 5).to(dtype)[:, :channels],
        "weight": torch.randn(taps, channels),
        "state": torch.randn(NUM_SLOTS, taps - 1, channels).to(dtype),
        **requests(lengths),
    }


def copied(case: dict[str, Tensor]) -> dict[str, Tensor]:
    return case | {"state": case["state"].clone()}


@one_thread()
def by_definition(case: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """(outputs, states) in float64, token by token."""
    c = {name: x.double() if x.is_floating_point() else x for name, x in case.items()}
    out, states = torch.zeros_like(c["value"]), c["state"].clone()
    unit = lambda x: x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()  # noqa: E731
    starts = c["query_start_loc"].tolist()
    for r, slot in enumerate(c["state_slots"].tolist()):
        if c["seq_lens"][r] == starts[r + 1] - starts[r]:
            states[slot] = 0
        for t in range(starts[r], starts[r + 1]):
            q = unit(c["query"][t]).repeat_interleave(2, 0) * c["query"].shape[2] ** -0.5
            k = unit(c["key"][t]).repeat_interleave(2, 0)
            softplus = torch.nn.functional.softplus(c["a"][t] + c["dt_bias"])
            state = states[slot] * torch.exp(-c["decay_rate"] * softplus)[:, None, None]
            delta = c["value"][t] - (k[:, None] @ state)[:, 0]
            delta *= torch.sigmoid(c["b"][t])[:, None]
            states[slot] = state + k[:, :, None] * delta[:, None]
            out[t] = (q[:, None] @ states[slot])[:, 0]
    return out, states


@cache
def solved(key_dim: int, value_dim: int, dtype: torch.dtype, lengths=MIXED):
    """(arguments, outputs and states by definition); not to be written to."""
    case = delta_rule_case(key_dim, value_dim, dtype, lengths)
    return case, *by_definition(case)


def in_pieces(call: Callable[..., Tensor], case: dict[str, Tensor], sizes: list[int]) -> Tensor:
    """One request that starts, computed in steps of `sizes` tokens."""
    shared = ("weight", "decay_rate", "dt_bias", "state", "state_slots")
    outputs, start = [], 0
    for size in sizes:
        piece = {n: x if n in shared else x[start : start + size] for n, x in case.items()}
        piece["query_start_loc"] = torch.tensor([0, size]).int()
        piece["seq_lens"] = torch.tensor([start + size]).int()
        outputs.append(call(**piece))
        start += size
    return torch.cat(outputs)


@pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)
@pytest.mark.parametrize(("key_dim", "value_dim"), SIZES)
def test_the_native_delta_rule_follows_the_definition(isa, key_dim, value_dim, dtype):
    case, expected, states = solved(key_dim, value_dim, dtype)
    case = copied(case)
    out = cpu_ops.gated_delta_rule(**case)
    assert out.dtype == dtype
    atol = 1e-6 if dtype == torch.float32 else torch.finfo(dtype).eps
    torch.testing.assert_close(out.double(), expected, atol=atol * expected.abs().max(), rtol=1e-5)
    torch.testing.assert_close(case["state"].double(), states, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("key_dim", "value_dim"), SIZES)
@one_thread()
def test_the_chunked_reference_follows_the_definition(key_dim, value_dim):
    case, expected, states = solved(key_dim, value_dim, torch.float32, SEVERAL_CHUNKS)
    case = copied(case)
    out = torch_ops.gated_delta_rule(**case)
    scale = expected.abs().max()
    torch.testing.assert_close(out.double(), expected, atol=2e-6 * scale, rtol=1e-5)
    torch.testing.assert_close(case["state"].double(), states, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)
@pytest.mark.parametrize("taps", (1, 2, 4, 8))
@pytest.mark.parametrize("channels", (1, 300))
def test_the_native_convolution_equals_the_reference(isa, channels, taps, dtype):
    case = conv_case(channels, taps, dtype)
    reference = copied(case)
    out, expected = cpu_ops.causal_conv1d(**case), torch_ops.causal_conv1d(**reference)
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(out, expected, atol=8 * torch.finfo(torch.float32).eps, rtol=8 * eps)
    assert torch.equal(case["state"], reference["state"])


@pytest.mark.parametrize("sizes", ([40], [1] * 40, [17, 1, 16, 6], [15, 25], [3, 37]))
def test_native_results_have_the_same_bits_however_a_prompt_is_cut(isa, sizes):
    for call, case in (
        (cpu_ops.gated_delta_rule, delta_rule_case(24, 36, lengths=((40, 0),))),
        (cpu_ops.causal_conv1d, conv_case(lengths=((40, 0),))),
    ):
        whole, cut = copied(case), copied(case)
        assert torch.equal(call(**whole), in_pieces(call, cut, sizes))
        assert torch.equal(whole["state"], cut["state"])


def test_the_chunked_reference_goes_on_from_its_states():
    case = delta_rule_case(24, 36, lengths=((200, 0),))
    whole, cut = copied(case), copied(case)
    out = torch_ops.gated_delta_rule(**whole)
    pieces = in_pieces(torch_ops.gated_delta_rule, cut, [70, 1, 64, 65])
    torch.testing.assert_close(pieces, out, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(cut["state"], whole["state"], atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("ops", (cpu_ops, torch_ops), ids=("cpu", "torch"))
def test_what_a_slot_held_before_means_nothing_to_a_request_that_starts(ops):
    for call, case in (
        (ops.gated_delta_rule, delta_rule_case(24, 36, lengths=((5, 0), (1, 0)))),
        (ops.causal_conv1d, conv_case(lengths=((5, 0), (1, 0)))),
    ):
        clean, stale = copied(case), copied(case)
        clean["state"].zero_()
        stale["state"].fill_(float("nan"))
        assert torch.equal(call(**clean), call(**stale))
        used = case["state_slots"].long()
        assert torch.equal(clean["state"][used], stale["state"][used])
        others = torch.ones(NUM_SLOTS, dtype=torch.bool)
        others[used] = False
        assert stale["state"][others].isnan().all()


def test_native_rows_have_the_same_bits_in_any_company_and_on_any_threads(isa, num_threads):
    from vllm.platforms import native

    case = delta_rule_case()
    together = copied(case)
    out = cpu_ops.gated_delta_rule(**together)
    native.load().cpu_set_num_threads(3)
    starts = case["query_start_loc"].tolist()
    for r in range(len(MIXED)):
        alone = copied(case)
        rows = slice(starts[r], starts[r + 1])
        for name in ("query", "key", "value", "a", "b"):
            alone[name] = alone[name][rows]
        alone["state_slots"] = case["state_slots"][r : r + 1]
        alone["seq_lens"] = case["seq_lens"][r : r + 1]
        alone["query_start_loc"] = torch.tensor([0, rows.stop - rows.start]).int()
        assert torch.equal(cpu_ops.gated_delta_rule(**alone), out[rows])
        slot = case["state_slots"][r]
        assert torch.equal(alone["state"][slot], together["state"][slot])


def test_a_decoding_step_of_the_reference_asks_the_device_for_no_value():
    lengths = ((1, 4), (1, 0), (1, 7))
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        for call, case in (
            (torch_ops.gated_delta_rule, delta_rule_case(24, 36, lengths=lengths)),
            (torch_ops.causal_conv1d, conv_case(lengths=lengths)),
        ):
            fake = {name: mode.from_tensor(x) for name, x in case.items()}
            assert call(**fake).shape[0] == 3  # a .item() would raise here


@pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)
def test_rms_norm_gated_equals_the_reference(isa, dtype):
    x, z = torch.randn(2, 33, 7, 100).to(dtype)
    gate = torch.cat((z, z), 1)[:, 3:10]
    weight = torch.randn(100)
    eps = torch.finfo(dtype).eps
    expected = torch_ops.rms_norm_gated(x, gate, weight, 1e-6)
    out = cpu_ops.rms_norm_gated(x, gate, weight, 1e-6)
    torch.testing.assert_close(out, expected, atol=1e-6, rtol=8 * eps)


@pytest.mark.parametrize("gate_size", (1, 100))
@pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)
def test_mul_sigmoid_equals_the_reference(isa, dtype, gate_size):
    x, gates = torch.randn(33, 7, 100).to(dtype), torch.randn(33, 14, gate_size).to(dtype)
    expected = x.clone()
    torch_ops.mul_sigmoid(expected, gates[:, 1::2])
    cpu_ops.mul_sigmoid(x, gates[:, 1::2])
    torch.testing.assert_close(x, expected, atol=1e-6, rtol=8 * torch.finfo(dtype).eps)


REFUSED_REQUESTS = [
    ("state_slots", lambda t: t.long(), "state_slots: given int64; accepted: int32"),
    ("state_slots", lambda t: t + NUM_SLOTS, "state_slots: given .*; accepted: 0 to 8"),
    ("state_slots", lambda t: t[:5], "seq_lens: given shape.*must be 5"),
    ("query_start_loc", lambda t: t + 1, "query_start_loc: given first element 1"),
    ("query_start_loc", lambda t: t.flip(0) - t[-1], "query_start_loc: decreases"),
    ("seq_lens", lambda t: t - 5, "seq_lens: given -4 for request 0 of 1 query tokens"),
]


def test_wrong_arguments_of_the_delta_rule_are_named():
    expect_refusals(
        cpu_ops.gated_delta_rule,
        delta_rule_case,
        [
            ("query", lambda t: t[:, :1], "key: given shape.*must be 1 .heads of query"),
            ("value", lambda t: t[:, :3], "value: given 3 heads; accepted: a multiple of the 2"),
            ("value", lambda t: t.half(), "value: given float16; accepted: the type of query"),
            ("a", lambda t: t[:, :3], r"a: given shape .*must be 4 \(heads of value\)"),
            ("dt_bias", lambda t: t.double(), "dt_bias: given float64; accepted: float32"),
            ("state", lambda t: t.half(), "state: given float16; accepted: float32"),
            ("state", lambda t: t[:, :, :4], "state: given a strided tensor"),
            ("state", lambda t: t[:, :3].clone(), r"state: .*must be 4 \(heads of value\)"),
            *REFUSED_REQUESTS,
        ],
    )
    with pytest.raises(ValueError, match="query: given heads of 257; accepted: 1 to 256"):
        cpu_ops.gated_delta_rule(**delta_rule_case(key_dim=257))


def test_wrong_arguments_of_the_convolution_are_named():
    expect_refusals(
        cpu_ops.causal_conv1d,
        conv_case,
        [
            ("x", lambda t: t.double(), "x: given float64; accepted: float32, bfloat16, float16"),
            ("x", lambda t: t[:, 1:], "out: given shape|weight: given shape.*must be 299"),
            ("weight", lambda t: t[:3], r"state: given shape .*must be 2 \(taps of weight - 1\)"),
            ("weight", lambda t: t.repeat(3, 1), "weight: given 12 taps .*; accepted: 1 to 8"),
            ("state", lambda t: t.half(), "state: given float16; accepted: the type of x"),
            *REFUSED_REQUESTS,
        ],
    )
