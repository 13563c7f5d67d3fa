"""Wrong arguments raise ValueError naming the argument, what was given and what is accepted."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from vllm.ops import cpu_ops

E4M3 = torch.float8_e4m3fn


def expect_refusals(
    call: Callable[..., object],
    arguments: Callable[[], dict[str, object]],
    refusals: list[tuple[str, Callable[[Tensor], object] | object, str]],
) -> None:
    """Replaces one argument at a time; each must be refused in a message of the given form."""
    call(**arguments())
    for name, change, message in refusals:
        wrong = arguments()
        wrong[name] = change(wrong[name]) if callable(change) else change
        with pytest.raises(ValueError, match=message):
            call(**wrong)


def test_pack_linear():
    expect_refusals(
        cpu_ops.pack_linear,
        lambda: {
            "weight": torch.randn(40, 100).to(E4M3),
            "row_scales": torch.ones(40, 4),
            "block_k": 32,
            "bias": torch.ones(40),
        },
        [
            ("weight", lambda t: t.float().double(), "weight: given torch.float64.*accepted"),
            ("weight", lambda t: t[0], r"weight: given .* shape \[100\]; accepted: \[n, k\]"),
            ("weight", lambda t: t.T, "weight: given a last dimension with stride 100"),
            ("row_scales", lambda t: t[:, :3], r"row_scales: .*\[40, 3\]; accepted: .*\[40, 4\]"),
            ("row_scales", lambda t: t.double(), "row_scales: given torch.float64"),
            ("block_k", 0, "block_k: given 0; accepted: 1 or more"),
            ("bias", lambda t: t[:39], r"bias: given .*\[39\]; accepted: .*\[40\]"),
        ],
    )


def test_linear():
    packed = cpu_ops.pack_linear(torch.randn(40, 100))
    expect_refusals(
        cpu_ops.linear,
        lambda: {"x": torch.randn(3, 100), "packed": packed, "out": torch.empty(3, 40)},
        [
            ("x", lambda t: t.double(), "x: given float64; accepted: float32, bfloat16, float16"),
            ("x", lambda t: t[0], r"x: given shape \[100\]; accepted: 2 dimensions"),
            ("x", lambda t: t[:, :99], r"weight: .*dimension 1 must be 99 \(columns of x\)"),
            ("x", lambda t: torch.randn(100, 3).T, "x: given a last dimension with stride 3"),
            ("out", lambda t: t[:2], r"out: given shape \[2, 40\]; .*must be 3 \(rows of x\)"),
            ("out", lambda t: t.half(), "out: given float16; accepted: the type of x"),
            ("out", torch.empty(3, 65), "out: given 65 columns; accepted: 2 panels"),
            ("out", torch.empty(3, 32), "out: given 32 columns"),
        ],
    )


def test_norms():
    def arguments() -> dict[str, object]:
        return {"x": torch.randn(3, 64), "weight": torch.ones(64), "eps": 1e-5}

    weight_refusals = [
        ("weight", lambda t: t[:63], r"weight: .*must be 64 \(last dimension of x\)"),
        ("weight", lambda t: t.half(), "weight: given float16; accepted: float32"),
        ("x", lambda t: t.view(3, 1, 1, 64), r"x: .*accepted: \[tokens, dim\] or \[tokens, heads"),
        ("x", lambda t: t.int(), "x: given int32; accepted: float32, bfloat16, float16"),
        ("eps", -1.0, "eps: given -1; accepted: 0 or more"),
    ]
    expect_refusals(
        cpu_ops.rms_norm,
        lambda: {**arguments(), "out": torch.empty(3, 64)},
        [
            *weight_refusals,
            ("out", lambda t: t[:2], r"out: given shape \[2, 64\]; accepted: \[3, 64\]"),
            ("out", lambda t: t.half(), "out: given float16; accepted: the type of x"),
        ],
    )
    expect_refusals(
        cpu_ops.fused_add_rms_norm,
        lambda: {**arguments(), "residual": torch.randn(3, 64)},
        [
            *weight_refusals,
            ("residual", lambda t: t[:2], r"residual: given shape \[2, 64\]; accepted: \[3, 64\]"),
            ("residual", lambda t: t.half(), "residual: given float16; accepted: the type of x"),
        ],
    )


def test_rotary_embedding():
    expect_refusals(
        cpu_ops.rotary_embedding,
        lambda: {
            "positions": torch.tensor([0, 9, 3]),
            "query": torch.randn(3, 4, 64),
            "key": torch.randn(3, 2, 64),
            "cos_sin_cache": torch.randn(10, 32),
        },
        [
            ("positions", torch.tensor([0, 10, 3]), "positions: given 10 for token 1; .*0 to 9"),
            ("positions", torch.tensor([0, 1, -1]), "positions: given -1 for token 2"),
            ("positions", lambda t: t.int(), "positions: given int32; accepted: int64"),
            ("positions", lambda t: t[:2], r"positions: .*must be 3 \(tokens of query\)"),
            ("query", lambda t: t.view(3, 256), "query: .*accepted: 3 dimensions"),
            ("key", lambda t: t[:2], r"key: .*must be 3 \(tokens of query\)"),
            ("key", lambda t: t[..., :32], r"key: .*must be 64 \(head size of query\)"),
            ("key", lambda t: t.half(), "key: given float16; accepted: the type of query"),
            ("cos_sin_cache", torch.randn(10, 66), "cos_sin_cache: given 66 columns; .*size 64"),
            ("cos_sin_cache", torch.randn(10, 31), "cos_sin_cache: given 31 columns; .*even"),
            ("cos_sin_cache", lambda t: t.half(), "cos_sin_cache: given float16"),
        ],
    )


def test_gelu_and_mul_and_soft_cap():
    expect_refusals(
        cpu_ops.gelu_and_mul,
        lambda: {"x": torch.randn(3, 64), "out": torch.empty(3, 32)},
        [
            ("x", lambda t: t[:, :62], r"x: .*must be 64 \(twice the columns of out\)"),
            ("out", lambda t: t.half(), "out: given float16; accepted: the type of x"),
        ],
    )
    expect_refusals(
        cpu_ops.soft_cap,
        lambda: {"x": torch.randn(3, 64), "softcap": 30.0},
        [
            ("x", lambda t: t.to(E4M3), "x: given float8_e4m3fn; accepted: float32"),
            ("softcap", 0.0, "softcap: given 0; accepted: a positive number"),
        ],
    )


def test_silu_and_mul():
    expect_refusals(
        cpu_ops.silu_and_mul,
        lambda: {"x": torch.randn(3, 64), "out": torch.empty(3, 32)},
        [
            ("x", lambda t: t[:2], r"x: .*must be 3 \(rows of out\)"),
            ("x", lambda t: t[:, :62], r"x: .*must be 64 \(twice the columns of out\)"),
            ("x", lambda t: t.to(E4M3), "x: given float8_e4m3fn; accepted: float32"),
            ("out", lambda t: t.half(), "out: given float16; accepted: the type of x"),
        ],
    )


CACHE_REFUSALS = [
    ("k_cache", torch.zeros(4, 2, 64, 8), "k_cache: given block size 8 .*a multiple of 16"),
    (
        "k_cache",
        torch.zeros(4, 2, 60, 16),
        "k_cache: given head size 60 .*a multiple of 8 up to 256",
    ),
    ("k_cache", torch.zeros(4, 2, 264, 16), "k_cache: given head size 264"),
    ("k_cache", torch.zeros(4, 2, 64, 16).int(), "k_cache: given int32; accepted: float32"),
    ("k_cache", torch.zeros(4, 2, 64, 32)[..., :16], "k_cache: given a strided tensor"),
    ("v_cache", torch.zeros(4, 2, 64, 16), r"v_cache: .*must be 16 \(block size of k_cache\)"),
    ("v_cache", torch.zeros(3, 2, 16, 64), r"v_cache: .*must be 4 \(blocks of k_cache\)"),
    ("v_cache", lambda t: t.half(), "v_cache: given float16; accepted: the type of k_cache"),
    ("k_scale", 2.0, "k_scale, v_scale: given 2, 1 for a float32 cache; accepted: 1"),
    ("v_scale", -1.0, "v_scale: given -1; accepted: a positive number"),
]


def test_reshape_and_cache():
    expect_refusals(
        cpu_ops.reshape_and_cache,
        lambda: {
            "key": torch.randn(3, 2, 64),
            "value": torch.randn(3, 2, 64),
            "k_cache": torch.zeros(4, 2, 64, 16),
            "v_cache": torch.zeros(4, 2, 16, 64),
            "slot_mapping": torch.tensor([63, -1, 0]),
        },
        [
            *CACHE_REFUSALS,
            ("key", lambda t: t[:, :1], r"key: .*must be 2 \(heads\)"),
            ("value", lambda t: t[:2], r"value: .*must be 3 \(tokens of key\)"),
            ("value", lambda t: t.half(), "value: given float16; accepted: the type of key"),
            ("slot_mapping", torch.tensor([0, 64, 1]), "given slot 64 for token 1; .*than 64"),
            ("slot_mapping", lambda t: t.int(), "slot_mapping: given int32; accepted: int64"),
        ],
    )


def test_paged_attention():
    def int32(*values: int) -> Tensor:
        return torch.tensor(values, dtype=torch.int32)

    expect_refusals(
        cpu_ops.paged_attention,
        lambda: {
            "query": torch.randn(5, 4, 64),
            "k_cache": torch.zeros(4, 2, 64, 16),
            "v_cache": torch.zeros(4, 2, 16, 64),
            "block_tables": torch.tensor([[0, 3], [2, -1]], dtype=torch.int32),
            "query_start_loc": int32(0, 4, 5),
            "seq_lens": int32(20, 16),
            "scale": 0.125,
            "out": torch.empty(5, 4, 64),
        },
        [
            *CACHE_REFUSALS,
            ("query", lambda t: t[:, :3], "query: given 3 heads; accepted: a multiple of the 2"),
            ("query", lambda t: t[..., :32], r"query: .*must be 64 \(head size of k_cache\)"),
            ("query", lambda t: t[:4], r"out: .*must be 4 \(tokens of query\)"),
            ("out", lambda t: t.half(), "out: given float16; accepted: the type of query"),
            ("block_tables", int32(0, 3), "block_tables: .*accepted: 2 dimensions"),
            ("block_tables", lambda t: t.long(), "block_tables: given int64; accepted: int32"),
            (
                "block_tables",
                lambda t: t[:, :1],
                "block_tables: given 1 blocks .*request 0 needs 2",
            ),
            ("block_tables", lambda t: t + 1, r"given block 4 at \[0, 1\]; accepted: 0 to 3"),
            ("block_tables", lambda t: t - 1, r"given block -1 at \[0, 0\]"),
            ("query_start_loc", int32(1, 4, 5), "query_start_loc: given first element 1"),
            ("query_start_loc", int32(0, 6, 5), "query_start_loc: decreases after request 1"),
            ("query_start_loc", int32(0, 3, 4), "given last element 4; accepted: 5"),
            ("query_start_loc", int32(0, 5), r"query_start_loc: .*must be 3 \(rows of"),
            ("seq_lens", int32(3, 16), "seq_lens: given 3 for request 0 of 4 query tokens"),
            ("seq_lens", int32(20), r"seq_lens: .*must be 2 \(rows of block_tables\)"),
            ("scale", float("nan"), "scale: given nan; accepted: a finite number"),
            ("sliding_window", -1, "sliding_window: given -1; accepted: 0 .none. or more"),
        ],
    )
