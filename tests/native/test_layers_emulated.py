"""csrc's norm of heads and rotation, kernels and launches, run thread by thread on a CPU.

CUDA is emulated (emulated_cuda/). On a GPU: tests/kernels/gpu/test_cuda_ops.py.
"""

from pathlib import Path

import pytest
import torch
from native import emulated
from native.emulated import compiled
from torch import Tensor

from vllm.ops import torch_ops

HERE = Path(__file__).parent
# Of Header in layers.cpp.
FIELDS = [
    "is_rotary", "type", "is_vector", "is_neox", "num_tokens", "num_heads", "num_queries",
    "num_keys", "head_dim", "rotary_dim", "max_position", "heads", "positions", "cos_sin",
    "query_norm", "key_norm", "cache", "slots", "num_slots", "is_e4m3",
]  # fmt: skip
TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
RTOL = {torch.float32: 3e-6, torch.bfloat16: 2**-7, torch.float16: 2**-9}
NUM_HEADS, NUM_QUERIES, NUM_KEYS = 9, 5, 2
CASES = [(dtype, size, 3) for dtype in TYPES for size in (64, 128, 256)]
# As many as let a thread take several heads.
CASES += [(torch.bfloat16, 128, 259), (torch.float32, 64, 257)]


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    return compiled(HERE / "layers.cpp", tmp_path_factory.mktemp("layers"), "-ffp-contract=off")


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def call(program, heads: Tensor, **values: int | Tensor) -> Tensor:
    """What becomes of `heads` [tokens, NUM_HEADS, head_dim]."""
    sizes = {
        "type": TYPES[heads.dtype], "is_vector": 1, "is_neox": 1, "num_tokens": len(heads),
        "num_heads": NUM_HEADS, "num_queries": NUM_QUERIES, "num_keys": NUM_KEYS,
        "head_dim": heads.shape[2],
    }  # fmt: skip
    tensors = {k: v for k, v in values.items() if isinstance(v, Tensor)}
    sizes |= {k: v for k, v in values.items() if not isinstance(v, Tensor)}
    result = "cache" if "cache" in tensors else "heads"
    return emulated.call(program, FIELDS, sizes, {"heads": heads, **tensors}, result)


def rotated(program, heads: Tensor, cos_sin: Tensor, positions: Tensor, **values) -> Tensor:
    sizes = {"rotary_dim": cos_sin.shape[1], "max_position": len(cos_sin)}
    tensors = {"cos_sin": cos_sin, "positions": positions}
    return call(program, heads, is_rotary=1, **sizes, **tensors, **values)


def cos_sin_cache(rotary_dim: int, num_positions: int = 300) -> Tensor:
    frequency = 1e4 ** -(torch.arange(0, rotary_dim, 2) / rotary_dim)
    angle = torch.arange(num_positions)[:, None] * frequency
    return torch.cat((angle.cos(), angle.sin()), -1)


def same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.view(torch.uint8), b.view(torch.uint8))


@pytest.mark.parametrize(("dtype", "head_dim", "num_tokens"), CASES)
def test_heads_that_are_rotated_whole_come_out_as_in_the_kernel_for_any(
    program, dtype, head_dim, num_tokens
):
    heads = torch.randn(num_tokens, NUM_HEADS, head_dim).to(dtype)
    cache, positions = cos_sin_cache(head_dim), torch.randint(0, 300, (num_tokens,))
    norms = {"query_norm": torch.rand(head_dim) + 0.5, "key_norm": torch.rand(head_dim) + 0.5}
    for weights in ({}, norms):
        whole = rotated(program, heads, cache, positions, **weights)
        general = rotated(program, heads, cache, positions, is_vector=0, **weights)
        assert same_bits(whole, general)
        expected = heads.clone()
        q, k = expected[:, :NUM_QUERIES], expected[:, NUM_QUERIES : NUM_QUERIES + NUM_KEYS]
        for part, weight in zip((q, k), weights.values()):
            torch_ops.rms_norm(part, weight, 1e-6, out=part)
        wide = expected.float()
        q, k = wide[:, :NUM_QUERIES], wide[:, NUM_QUERIES : NUM_QUERIES + NUM_KEYS]
        torch_ops.rotary_embedding(positions, q, k, cache)
        # Terms may cancel, and the norms may round differently: errors are those of the terms.
        atol = RTOL[dtype] * 4
        torch.testing.assert_close(whole.float(), wide, rtol=RTOL[dtype], atol=atol)
        untouched = NUM_QUERIES + NUM_KEYS
        assert same_bits(whole[:, untouched:].clone(), heads[:, untouched:].clone())


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_norm_and_rotation_in_one_equal_the_two(program, dtype, head_dim):
    heads = torch.randn(2, NUM_HEADS, head_dim).to(dtype)
    cache, positions = cos_sin_cache(head_dim), torch.randint(0, 300, (2,))
    weight = torch.rand(head_dim) + 0.5
    fused = rotated(program, heads, cache, positions, query_norm=weight, key_norm=weight)
    normed = call(program, heads, query_norm=weight, num_queries=NUM_QUERIES + NUM_KEYS)
    assert same_bits(fused, rotated(program, normed, cache, positions))


@pytest.mark.parametrize("num_tokens", [3, 256])
def test_positions_outside_the_cache_rotate_by_nan(program, num_tokens):
    heads = torch.randn(num_tokens, NUM_HEADS, 64).bfloat16()
    positions = torch.zeros(num_tokens, dtype=torch.int64)
    positions[1], positions[2] = -1, 10
    result = rotated(program, heads, cos_sin_cache(64, 10), positions)
    is_nan = result[:, : NUM_QUERIES + NUM_KEYS].isnan()
    assert bool(is_nan[1:3].all()) and not is_nan[[0, *range(3, num_tokens)]].any()
    assert not result[:, NUM_QUERIES + NUM_KEYS :].isnan().any()


NUM_SLOTS = 320
# Columns that are rotated; a head that is rotated in part goes another way than a whole one.
SHAPES = [(64, 64), (128, 128), (256, 256), (256, 64), (80, 80), (64, 32)]


@pytest.mark.parametrize("is_vector", [1, 0])
@pytest.mark.parametrize("has_norm", [True, False])
@pytest.mark.parametrize("cache_type", ["own", "e4m3"])
@pytest.mark.parametrize(("head_dim", "rotary_dim"), SHAPES)
@pytest.mark.parametrize(
    ("dtype", "num_tokens"),
    [
        (torch.bfloat16, 3),
        pytest.param(torch.float16, 257, marks=pytest.mark.slow),
    ],
)
def test_k_and_v_are_in_the_cache_as_a_write_after_the_rotation_leaves_them(
    program, dtype, num_tokens, head_dim, rotary_dim, cache_type, has_norm, is_vector
):
    heads = torch.randn(num_tokens, NUM_HEADS, head_dim).to(dtype) * 20
    cos_sin, positions = cos_sin_cache(rotary_dim), torch.randint(0, 300, (num_tokens,))
    norm = {"query_norm": torch.rand(head_dim) + 0.5, "key_norm": torch.rand(head_dim) + 0.5}
    options = (norm if has_norm else {}) | {"is_vector": is_vector}
    slots = torch.randperm(NUM_SLOTS)[:num_tokens]
    slots[1] = -1
    stored = torch.float8_e4m3fn if cache_type == "e4m3" else dtype
    scales = (0.03, 0.07) if cache_type == "e4m3" else (1.0, 1.0)
    # One block of a token, [slots, heads, dim], which torch_ops has in another order of axes.
    cache = torch.full((2, NUM_SLOTS, NUM_KEYS, head_dim), 7.0).to(stored)
    expected = cache.clone()
    turned = rotated(program, heads, cos_sin, positions, **options)
    key, value = turned[:, NUM_QUERIES:].split((NUM_KEYS, NUM_HEADS - NUM_QUERIES - NUM_KEYS), 1)
    k_cache, v_cache = expected[0].unsqueeze(-1), expected[1].unsqueeze(2)
    torch_ops.reshape_and_cache(key, value, k_cache, v_cache, slots, *scales)
    assert not same_bits(cache, expected)
    sizes = {"num_slots": NUM_SLOTS, "is_e4m3": int(cache_type == "e4m3")}
    written = {"cache": cache, "slots": slots}
    result = rotated(program, heads, cos_sin, positions, **options, **sizes, **written)
    assert same_bits(result, expected)
