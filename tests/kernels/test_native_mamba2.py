"""The native Mamba2, its convolution with a bias and its norm: the definition, bit by bit the same
in any company."""

import pytest
import torch
from test_arguments import expect_refusals
from test_delta_net import FLOAT_DTYPES, MIXED, NUM_SLOTS, REFUSED_REQUESTS, copied, requests
from tiny_models import one_thread
from torch import Tensor

from vllm.kernels.mamba2_numerics import recurrence
from vllm.ops import cpu_ops, torch_ops

# Heads, groups, head size and state size.
SIZES = ((4, 2, 64, 128), (4, 4, 10, 12), (6, 2, 33, 256), (2, 1, 256, 16))
OF_TOKENS = ("x", "dt", "b", "c")


def mamba2_case(sizes=SIZES[0], dtype=torch.float32, lengths=MIXED) -> dict[str, Tensor]:
    """Views of one projection, as the layer gives them."""
    heads, groups, head_dim, state_size = sizes
    num_tokens = sum(now for now, _ in lengths)
    parts = heads * head_dim, groups * state_size, groups * state_size
    x, b, c = torch.randn(num_tokens, sum(parts)).to(dtype).split(parts, 1)
    return {
        "x": x.unflatten(1, (heads, head_dim)),
        "dt": torch.randn(num_tokens, heads + 3).to(dtype)[:, :heads],
        "b": b.unflatten(1, (groups, state_size)),
        "c": c.unflatten(1, (groups, state_size)),
        "decay_rate": torch.rand(heads),
        "dt_bias": torch.randn(heads),
        "skip": torch.randn(heads),
        "state": torch.randn(NUM_SLOTS, heads, state_size, head_dim),
        **requests(lengths),
    }


def parts_of(case: dict[str, Tensor]):
    """(tokens, slot, whether it starts) of each request."""
    starts = case["query_start_loc"].tolist()
    for r, slot in enumerate(case["state_slots"].tolist()):
        is_fresh = case["seq_lens"][r] == starts[r + 1] - starts[r]
        yield slice(starts[r], starts[r + 1]), slot, bool(is_fresh)


def alone(case: dict[str, Tensor], r: int, tokens: slice, before: int = 0) -> dict[str, Tensor]:
    """Some tokens of request `r`, after `before` others of this step."""
    size = tokens.stop - tokens.start
    own = {name: x[tokens] if name in OF_TOKENS else x for name, x in case.items()}
    kept = case["seq_lens"][r] - case["query_start_loc"][r + 1] + case["query_start_loc"][r]
    own["query_start_loc"] = torch.tensor([0, size]).int()
    own["state_slots"] = case["state_slots"][r : r + 1]
    own["seq_lens"] = (kept + before + size)[None].int()
    return own


@pytest.mark.parametrize("limits", [(0.0, float("inf")), (0.3, 0.7)], ids=str)
@pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@one_thread()
def test_it_follows_the_definition(isa, sizes, dtype, limits):
    case = mamba2_case(sizes, dtype)
    before = case["state"].clone()
    out = cpu_ops.mamba2_scan(**case, dt_limits=limits)
    of_heads = [case[name].double() for name in ("decay_rate", "dt_bias", "skip")]
    assert out.dtype == dtype
    eps = max(torch.finfo(dtype).eps, 2e-6)
    for tokens, slot, is_fresh in parts_of(case):
        state = torch.zeros_like(before[slot]) if is_fresh else before[slot]
        given = [case[name][tokens].double() for name in OF_TOKENS]
        wanted, after = recurrence(*given, *of_heads, state.double(), limits)
        torch.testing.assert_close(
            out[tokens].double(), wanted, atol=eps * wanted.abs().max().item(), rtol=eps
        )
        torch.testing.assert_close(case["state"][slot].double(), after, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("sizes", ([33], [1] * 33, [17, 1, 15], [16, 17], [3, 30]))
def test_a_prompt_has_the_same_bits_however_it_is_cut(isa, sizes):
    whole = mamba2_case(SIZES[1])
    pieces = copied(whole)
    out = cpu_ops.mamba2_scan(**whole)
    tokens, slot, _ = [*parts_of(whole)][2]
    assert tokens.stop - tokens.start == sum(sizes)
    found, start = [], tokens.start
    for size in sizes:
        piece = alone(pieces, 2, slice(start, start + size), start - tokens.start)
        found.append(cpu_ops.mamba2_scan(**piece))
        start += size
    assert torch.equal(torch.cat(found), out[tokens])
    assert torch.equal(pieces["state"][slot], whole["state"][slot])


def test_rows_have_the_same_bits_in_any_company_and_on_any_threads(isa, num_threads):
    from vllm.platforms import native

    case = mamba2_case()
    together = copied(case)
    out = cpu_ops.mamba2_scan(**together)
    native.load().cpu_set_num_threads(3)
    for r, (tokens, slot, _) in enumerate(parts_of(case)):
        own = alone(copied(case), r, tokens)
        assert torch.equal(cpu_ops.mamba2_scan(**own), out[tokens])
        assert torch.equal(own["state"][slot], together["state"][slot])


def test_what_a_slot_held_before_means_nothing_to_a_request_that_starts():
    case = mamba2_case(SIZES[1], lengths=((5, 0), (1, 0)))
    clean, stale = copied(case), copied(case)
    clean["state"].zero_()
    stale["state"].fill_(float("nan"))
    assert torch.equal(cpu_ops.mamba2_scan(**clean), cpu_ops.mamba2_scan(**stale))
    used = case["state_slots"].long()
    assert torch.equal(clean["state"][used], stale["state"][used])
    stale["state"][used] = float("nan")
    assert stale["state"].isnan().all(), "no other slot was written"


@pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)
def test_the_norm_of_groups_equals_the_reference(isa, dtype):
    x, z = torch.randn(2, 33, 7, 100).to(dtype)
    gate = torch.cat((z, z), 1)[:, 3:10]
    weight = torch.randn(7, 100)
    expected = torch_ops.silu_mul_rms_norm(x, gate, weight, 1e-6)
    out = cpu_ops.silu_mul_rms_norm(x, gate, weight, 1e-6)
    torch.testing.assert_close(out, expected, atol=1e-6, rtol=8 * torch.finfo(dtype).eps)
    assert torch.equal(cpu_ops.silu_mul_rms_norm(x[5:6], gate[5:6], weight, 1e-6), out[5:6])


def test_wrong_arguments_are_named():
    expect_refusals(
        cpu_ops.mamba2_scan,
        mamba2_case,
        [
            ("x", lambda t: t[:, :3], "x: given 3 heads; accepted: a multiple of the 2 groups"),
            ("x", lambda t: t.half(), "dt: given float32; accepted: the type of x"),
            ("b", lambda t: t[:, :1], "c: given shape.*must be 1 .groups of b"),
            ("dt", lambda t: t[:, :3], r"dt: given shape .*must be 4 \(heads of x\)"),
            ("skip", lambda t: t.double(), "skip: given float64; accepted: float32"),
            ("state", lambda t: t.half(), "state: given float16; accepted: float32"),
            ("state", lambda t: t[:, :, :4], "state: given a strided tensor"),
            ("state", lambda t: t[:, :3].clone(), r"state: .*must be 4 \(heads of x\)"),
            *REFUSED_REQUESTS,
        ],
    )
    with pytest.raises(ValueError, match="b: given heads of 257; accepted: 1 to 256"):
        cpu_ops.mamba2_scan(**mamba2_case((2, 1, 8, 257)))


def test_wrong_arguments_of_the_norm_are_named():
    expect_refusals(
        cpu_ops.silu_mul_rms_norm,
        lambda: {
            "x": torch.randn(5, 2, 12),
            "gate": torch.randn(5, 2, 12),
            "weight": torch.randn(2, 12),
            "eps": 1e-6,
        },
        [
            ("gate", lambda t: t[:, :, :8], "gate: given shape .*the shape of x"),
            ("gate", lambda t: t.half(), "gate: given float16; accepted: the type of x"),
            ("weight", lambda t: t[:, :8].clone(), r"weight: .*must be 12 \(columns of x\)"),
            ("weight", lambda t: t[:1], r"weight: .*must be 2 \(groups of x\)"),
            ("weight", lambda t: t.half(), "weight: given float16; accepted: float32"),
            ("eps", -1.0, "eps: given -1; accepted: 0 or more"),
        ],
    )
