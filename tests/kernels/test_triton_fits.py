"""Every Triton kernel compiles for chips that are not here, as its caller launches it, and fits
their shared memory. Needs Triton, and no GPU.

Callers get tensors of the device `meta`, which have shapes and no memory; Triton gets a driver that
knows the chip, and compiles instead of launching.
"""

import os
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from slow import quick

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("Triton's interpreter compiles nothing", allow_module_level=True)
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from vllm.architectures.decoder import RELU2
from vllm.formats.act_scheme import ActScheme
from vllm.formats.scales import Scales
from vllm.formats.weight_format import WeightFormat
from vllm.kernels.activations import InputQuant
from vllm.kernels.interface import MoETensors
from vllm.kernels.select.problem import MoEProblem
from vllm.kernels.triton import (
    attention,
    delta_rule,
    gates,
    latent_attention,
    linear,
    mamba2,
    moe,
    moe_router,
    moe_rows,
    skinny,
)
from vllm.ops.fp8_quant import ScaleLayout

# Bytes of shared memory that a program can have, and multiprocessors.
CHIPS = {
    89: (101376, 142), 90: (232448, 132), 100: (232448, 148), 103: (232448, 148),
    120: (101376, 188), 121: (101376, 48),
}  # fmt: skip
F8, F32, BF16, I32, I64 = (
    torch.float8_e4m3fn, torch.float32, torch.bfloat16, torch.int32, torch.int64,
)  # fmt: skip
CACHED = (
    moe_rows.capability_major, moe_rows.launch_dependent, attention.read_chip,
    attention.arrival_counters,
)  # fmt: skip


def empty(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


# ---------------------------------------------------------------- what is launched


def few_heads_to_one_cache_head(dim: int = 128, cache: torch.dtype = BF16) -> None:
    attend(32, 8, dim, cache)


def all_heads_to_one_cache_head(dim: int, cache: torch.dtype) -> None:
    attend(64, 1, dim, cache)


def capped_scores(dim: int, cache: torch.dtype) -> None:
    attend(8, 4, dim, cache, softcap=50.0)


def scores_with_sinks(dim: int, cache: torch.dtype) -> None:
    attend(64, 8, dim, cache, has_sinks=True)


def chunks_of_keys(dim: int, cache: torch.dtype) -> None:
    attend(40, 8, dim, cache, chunk=8192)


def attend(
    heads: int,
    kv_heads: int,
    dim: int,
    cache: torch.dtype,
    softcap: float = 0.0,
    has_sinks: bool = False,
    chunk: int = 0,
) -> None:
    """A long prompt, short ones, decoding, and verifying draft tokens."""
    verified = [
        (64, 4, n, 32768) for n in attention.verify_queries(heads // kv_heads, max(64, dim))
    ]
    kv = empty(100, 16, kv_heads, dim, dtype=cache)
    sinks = empty(heads, dtype=F32) if has_sinks else None
    for num_tokens, num_seqs, most_new, longest in ((4000, 2, 3500, 3600), (64, 2, 33, 600),
                                                    (64, 64, 1, 4096), *verified):  # fmt: skip
        attention.paged_attention(
            empty(num_tokens, heads, dim), kv, kv, empty(num_seqs, 300, dtype=I32),
            empty(num_seqs + 1, dtype=I32), empty(num_seqs, dtype=I32), 0.1,
            chunk, sinks=sinks, softcap=softcap, is_chunked=chunk > 0, max_query_len=most_new,
            max_seq_len=longest,
        )  # fmt: skip
    new = empty(7, kv_heads, dim)
    attention.reshape_and_cache(new, new, kv, kv, empty(7, dtype=I64))


def latents(heads: int, latent: int, cache: torch.dtype) -> None:
    """A long prompt, decoding, and verifying draft tokens."""
    pages = empty(100, 16, latent + 64, dtype=cache)
    for num_tokens, num_seqs, most_new, longest in ((4000, 2, 3500, 3600), (64, 64, 1, 4096),
                                                    (64, 4, 3, 32768)):  # fmt: skip
        latent_attention.paged_latent_attention(
            empty(num_tokens, heads, latent + 64), pages, empty(num_seqs, 300, dtype=I32),
            empty(num_seqs + 1, dtype=I32), empty(num_seqs, dtype=I32), 0.1, latent,
            max_query_len=most_new, max_seq_len=longest,
        )  # fmt: skip
    latent_attention.write_latents(empty(7, latent + 64), pages, empty(7, dtype=I64), 1.0)


def block_products(k: int) -> None:
    for tile in linear.TILES:
        m = tile.most_tokens or 4096
        linear.fp8_block_gemm(
            empty(m, k, dtype=F8), empty(m, -(-k // 128), dtype=F32), empty(4096, k, dtype=F8),
            empty(32, -(-k // 128), dtype=F32), None, (128, 128), empty(m, 4096),
        )  # fmt: skip


def recurrence(dtype: torch.dtype, dim: int) -> None:
    tokens, heads, requests = 300, 8, 3
    own = empty(requests, dtype=I32), empty(requests + 1, dtype=I32), empty(requests, dtype=I32)
    q, v = (empty(tokens, n, dim, dtype=dtype) for n in (heads // 2, heads))
    gate, rate = empty(tokens, heads, dtype=dtype), empty(heads, dtype=F32)
    state = empty(5, heads, dim, dim, dtype=F32)
    delta_rule.gated_delta_rule(q, q, v, gate, gate, rate, rate, state, *own)
    x, weight = empty(tokens, 1024, dtype=dtype), empty(4, 1024, dtype=dtype)
    delta_rule.causal_conv1d(x, weight, empty(5, 3, 1024, dtype=dtype), *own)


def mamba(head_dim: int, state_size: int) -> None:
    tokens, heads, groups, requests = 300, 8, 2, 3
    own = empty(requests, dtype=I32), empty(requests + 1, dtype=I32), empty(requests, dtype=I32)
    b, of_heads = empty(tokens, groups, state_size), empty(heads, dtype=F32)
    state = empty(5, heads, state_size, head_dim, dtype=F32)
    mamba2.mamba2_scan(
        empty(tokens, heads, head_dim), empty(tokens, heads), b, b, *(of_heads,) * 3, state, *own
    )
    x, weight = empty(tokens, 1024), empty(4, 1024, dtype=F32)
    bias = empty(1024, dtype=F32)
    delta_rule.causal_conv1d(x, weight, empty(5, 3, 1024), *own, bias=bias)
    heads_of_group = empty(tokens, groups, 4096 // groups)
    norm = empty(groups, 4096 // groups, dtype=F32)
    gates.silu_mul_rms_norm(heads_of_group, heads_of_group, norm, 1e-5)
    gates.relu2(empty(tokens, 3712))


def gated_outputs() -> None:
    x = empty(100, 16, 256)
    gates.mul_sigmoid(x, x)
    gates.gelu_and_mul(empty(100, 2 * 2048))
    gates.gelu_and_mul(empty(100, 2 * 2048), "tanh")
    gates.mul_sigmoid(x, empty(100, 16, 1))
    gates.rms_norm_gated(empty(100, 32, 128), empty(100, 32, 128), empty(128, dtype=F32), 1e-6)
    skinny.product(empty(5, 2048), empty(64, 2048))


def routers() -> None:
    for num_experts, top_k, groups in ((128, 8, 1), (256, 8, 8)):
        moe_router.route(
            empty(100, num_experts), top_k, True, num_groups=groups,
            scoring="sigmoid" if groups > 1 else "softmax", topk_groups=max(1, groups // 2),
        )  # fmt: skip
    routing = moe_router.Router(256, 8, True)
    gate = SimpleNamespace(dense=SimpleNamespace(weight=empty(257, 2048), padded=None))
    moe_router.choose_experts(empty(9, 2048), gate, routing)


def rows_of_experts() -> None:
    for num_tokens in (1, 50, 1024, 75000):
        ids = empty(num_tokens, 8, dtype=I64)
        moe_rows.sort(ids, 128, block_m=64)
        moe_rows.sort(ids, 128, block_m=128, is_aligned=True)
    moe_rows.sort(empty(50, 8, dtype=I64), 128, rows_per_expert=50)
    positions = empty(100, 8, dtype=I32)
    for layout in (
        moe_rows.Rows(1000), moe_rows.Rows(1000, scales=Scales.UE8M0),
        moe_rows.Rows(1280, rows_per_expert=10), moe_rows.Rows(1000, is_row_major=True),
    ):  # fmt: skip
        moe_rows.spread(empty(100, 7168), positions, layout)
        moe_rows.activate(empty(layout.num_rows, 2 * 768), positions, layout)
    shares, places = empty(10, 8, dtype=F32), empty(10, 8, dtype=I32)
    for hidden in (2048, 7168):
        rows = moe_rows.ExpertRows(empty(80, hidden), shares, places, 128)
        rows.total()
        quant = InputQuant(ScaleLayout.COLUMN_MAJOR)
        rows.add_rms_norm(empty(10, hidden), empty(hidden, dtype=F32), 1e-6, quant)


def experts(
    weight: str, num_experts: int, hidden: int, inner: int, activation: str = "silu"
) -> None:
    weight_format = WeightFormat.parse(weight)
    is_fp8 = weight_format.element == "fp8"
    act = ActScheme.DYNAMIC_GROUP128 if is_fp8 else ActScheme.NONE
    problem = MoEProblem(num_experts, 8, hidden, inner, weight_format, (act,), dtype="bf16",
                         activation=activation)  # fmt: skip
    first = problem.num_first_parts * inner

    def stored(n: int, k: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        scales = empty(num_experts, n // 128, k // 128, dtype=F32) if is_fp8 else None
        return empty(num_experts, n, k, dtype=F8 if is_fp8 else BF16), scales

    (gate_up, up_scales), (down, down_scales) = stored(first, hidden), stored(hidden, inner)
    tensors = MoETensors(weight_format, gate_up, down, up_scales, down_scales)
    moe.Experts(problem, tensors).warm_up()


CASES = {
    "attention of 128, bf16": lambda: few_heads_to_one_cache_head(),
    "attention of 256, fp8, one head": lambda: all_heads_to_one_cache_head(256, F8),
    "attention of 64, bf16, with sinks": lambda: scores_with_sinks(64, BF16),
    "attention over latents of 512": lambda: latents(128, 512, BF16),
    "block products": lambda: block_products(4096),
    "recurrence": lambda: recurrence(BF16, 128),
    "mamba2 of Nemotron-H": lambda: mamba(64, 128),
    "experts without a gate": lambda: experts("bf16", 128, 2688, 1856, RELU2),
    "experts in fp8": lambda: experts("fp8-block", 128, 2048, 768),
    "rows of experts": rows_of_experts,
    "routers": routers,
    "gated outputs": gated_outputs,
}
QUICK = ("attention of 128, bf16", "block products", "mamba2 of Nemotron-H", "routers")
MORE = {
    **{
        f"attention of {dim}, {cache}, {name.__name__}": lambda d=dim, c=cache, f=name: f(d, c)
        for dim in (64, 96, 128, 256)
        for cache in (BF16, F8)
        for name in (
            *(few_heads_to_one_cache_head, all_heads_to_one_cache_head),
            *(capped_scores, scores_with_sinks),
        )
    },
    **{
        f"attention over latents of {latent}, {cache}, {heads} heads": (
            lambda h=heads, n=latent, c=cache: latents(h, n, c)
        )
        for heads in (16, 20, 128)
        for latent in (256, 512)
        for cache in (BF16, F8)
    },
    "attention of 128, fp8, in chunks": lambda: chunks_of_keys(128, F8),
    "block products of part of a block": lambda: block_products(4160),
    "recurrence of 256 in float32": lambda: recurrence(F32, 256),
    "mamba2 of large states": lambda: mamba(128, 256),
    "experts without a gate in fp8": lambda: experts("fp8-block", 8, 1024, 2688, RELU2),
    "experts in bf16": lambda: experts("bf16", 8, 4096, 14336),
}


# ---------------------------------------------------------------- chips


@contextmanager
def chip(capability: int):
    """Launches compile for it; gives (kernel, bytes of shared memory) of those that were."""
    shared_memory, num_sms = CHIPS[capability]
    facts = {"max_shared_mem": shared_memory, "multiprocessor_count": num_sms}
    launched: list[tuple[str, int]] = []
    run = JITFunction.run

    def compile_only(self, *args, grid, warmup, **kwargs):
        kernel = run(self, *args, grid=grid, warmup=True, **kwargs)
        assert kernel.asm["cubin"]
        launched.append((self.fn.__name__, kernel.metadata.shared))
        return kernel

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(JITFunction, "run", compile_only)
        known = SimpleNamespace(
            get_current_device=lambda: capability,  # what is compiled is kept by device
            get_current_stream=lambda device: 0,
            get_current_target=lambda: GPUTarget("cuda", capability, 32),
            utils=SimpleNamespace(get_device_properties=lambda index: facts),
        )
        patch.setattr(driver, "_active", known)
        for function in CACHED:
            function.cache_clear()
        try:
            yield launched
        finally:
            for function in CACHED:
                function.cache_clear()


def check(capability: int, launch) -> None:
    with chip(capability) as launched:
        launch()
    assert launched
    too_large = [found for found in launched if found[1] > CHIPS[capability][0]]
    assert not too_large


@pytest.mark.parametrize("case", quick(CASES, QUICK))
def test_kernels_fit_a_chip_of_little_shared_memory(case):
    check(120, CASES[case])


@pytest.mark.parametrize("most, num_kernels", [(1, 1), (8, 1), (9, 3)])
def test_steps_of_few_tokens_each_take_one_launch_for_the_convolution_and_one_for_states(
    most, num_kernels
):
    """Of up to 8 tokens of a request, whatever the number of requests."""
    requests = 4
    tokens = requests * most
    own = empty(requests, dtype=I32), empty(requests + 1, dtype=I32), empty(requests, dtype=I32)
    x, weight, rate = empty(tokens, 1024), empty(4, 1024, dtype=F32), empty(4, dtype=F32)
    options = {"draft_slots": empty(tokens, dtype=I32), "max_query_len": most}
    q, gate = empty(tokens, 4, 64), empty(tokens, 4)
    state = empty(9, 4, 64, 64, dtype=F32)
    with chip(90) as launched:
        delta_rule.causal_conv1d(x, weight, empty(9, 3, 1024), *own, **options)
        of_convolution = len(launched)
        delta_rule.gated_delta_rule(q, q, q, gate, gate, rate, rate, state, *own, **options)
        of_both = len(launched)
        mamba2.mamba2_scan(q, gate, q, q, rate, rate, rate, state, *own, **options)
    assert (of_convolution, of_both) == (num_kernels, 2 * num_kernels)
    assert len(launched) - of_both == (1 if most <= 8 else 2)


@pytest.mark.build
@pytest.mark.parametrize("case", [*CASES, *MORE])
@pytest.mark.parametrize("capability", CHIPS)
def test_kernels_fit_every_chip(capability, case):
    check(capability, (CASES | MORE)[case])
