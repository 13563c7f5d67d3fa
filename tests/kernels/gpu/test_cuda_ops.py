"""The CUDA layers equal the torch references, computed on the CPU from the same values.

Outputs lie inside larger buffers of NaN: what is not written, or written beside them, shows.
"""

import pytest
import torch
from torch import Tensor

from vllm.ops import torch_ops
from vllm.ops.paged_attention import CacheTarget

DEVICE = "cuda"
pytestmark = pytest.mark.gpu
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
# What rounding once to bfloat16 may cost, twice that of float16, and some float32 operations.
RTOL = {torch.bfloat16: 2**-8, torch.float16: 2**-10, torch.float32: 3e-6}
ATOL = {torch.bfloat16: 1e-30, torch.float16: 1e-7, torch.float32: 1e-30}
TOKENS = (0, 1, 2, 7, 33, 300)
GUARD = 64


@pytest.fixture(scope="module")
def ops():
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    from vllm.kernels import cuda_ops

    return cuda_ops


class Guarded:
    """An output inside a buffer of NaN that checks, later, that nothing beside it was written."""

    def __init__(self, *shape: int, dtype: torch.dtype):
        size = torch.Size(shape).numel()
        self.buffer = torch.full((size + 2 * GUARD,), torch.nan, dtype=dtype, device=DEVICE)
        self.tensor = self.buffer[GUARD:-GUARD].view(shape)

    def read(self) -> Tensor:
        edges = torch.cat([self.buffer[:GUARD], self.buffer[-GUARD:]])
        assert bool(edges.isnan().all()), "written beside the output"
        return self.tensor.cpu()


def randn(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, device=DEVICE).to(dtype)


def apart(x: Tensor, by: int) -> Tensor:
    """The same values in rows `by` elements further apart, the first one by elements in."""
    wide = torch.full((*x.shape[:-1], x.shape[-1] + by), torch.nan, dtype=x.dtype, device=DEVICE)
    wide[..., by:] = x
    return wide[..., by:]


def assert_close(given: Tensor, exact: Tensor, dtype: torch.dtype, atol: float | None = None):
    """Within the rounding of `dtype` of float64 `exact`."""
    assert given.dtype == dtype
    atol = ATOL[dtype] if atol is None else atol
    torch.testing.assert_close(given.double(), exact, rtol=RTOL[dtype], atol=atol)


def same_bits(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and torch.equal(
        a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8)
    )


# ---------------------------------------------------------------- norms


def exact_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.cpu().double()
    return wide * (wide.square().mean(-1, keepdim=True) + eps).rsqrt() * weight.cpu().double()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [1, 8, 63, 64, 128, 256, 257, 264, 576, 4096, 8192, 8200, 16384])
def test_rms_norm_is_right_to_the_last_rounding(ops, dtype, dim):
    weight = torch.rand(dim, device=DEVICE) + 0.5
    for num_tokens in TOKENS if dim < 5000 else (1, 7):
        x = randn(num_tokens, dim, dtype=dtype)
        out = Guarded(num_tokens, dim, dtype=dtype)
        assert ops.rms_norm(x, weight, 1e-6, out=out.tensor) is out.tensor
        assert_close(out.read(), exact_norm(x, weight, 1e-6), dtype)
        reference = torch_ops.rms_norm(x.cpu(), weight.cpu(), 1e-6)
        torch.testing.assert_close(out.read(), reference, rtol=2 * RTOL[dtype], atol=ATOL[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [64, 128, 4096, 16384])
def test_a_row_has_the_same_bits_alone_strided_misaligned_and_in_place(ops, dtype, dim):
    x, weight = randn(9, dim, dtype=dtype), torch.rand(dim, device=DEVICE)
    normed = ops.rms_norm(x, weight, 1e-5)
    assert same_bits(ops.rms_norm(x[4:5], weight, 1e-5), normed[4:5])
    assert same_bits(ops.rms_norm(apart(x, 3), weight, 1e-5), normed)
    assert same_bits(ops.rms_norm(apart(x, 8), apart(weight, 1), 1e-5), normed)
    in_place = apart(x, 16)
    ops.rms_norm(in_place, weight, 1e-5, out=in_place)
    assert same_bits(in_place, normed)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_tokens", TOKENS)
@pytest.mark.parametrize("head_dim", [64, 80, 128, 256, 320])
def test_heads_of_one_qkv_tensor_are_normed_where_they_lie(ops, dtype, num_tokens, head_dim):
    qkv = randn(num_tokens, 7 * head_dim, dtype=dtype)
    before, weight = qkv.clone(), torch.rand(head_dim, device=DEVICE) + 0.5
    key = qkv[:, 4 * head_dim : 6 * head_dim].view(num_tokens, 2, head_dim)
    ops.rms_norm(key, weight, 1e-6, out=key)
    heads = before[:, 4 * head_dim : 6 * head_dim].reshape(num_tokens, 2, head_dim)
    assert_close(key.cpu(), exact_norm(heads, weight, 1e-6), dtype)
    assert same_bits(qkv[:, : 4 * head_dim], before[:, : 4 * head_dim])
    assert same_bits(qkv[:, 6 * head_dim :], before[:, 6 * head_dim :])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [63, 128, 576, 4096, 12288])
def test_the_residual_is_added_rounded_and_normed(ops, dtype, dim):
    weight = torch.rand(dim, device=DEVICE) + 0.5
    for num_tokens in TOKENS:
        x, residual = randn(num_tokens, dim, dtype=dtype), randn(num_tokens, dim, dtype=dtype)
        total = x + residual
        strided_x, strided_residual = apart(x, 5), apart(residual, 24)
        ops.fused_add_rms_norm(x, residual, weight, 1e-6)
        ops.fused_add_rms_norm(strided_x, strided_residual, weight, 1e-6)
        assert same_bits(residual, total) and same_bits(strided_residual, total)
        assert same_bits(x, ops.rms_norm(total, weight, 1e-6)) and same_bits(strided_x, x)


@pytest.mark.parametrize("dim", [264, 4096, 5120, 8192])
def test_blocks_that_take_several_rows(ops, dim):
    num_rows, dtype = 2500, torch.bfloat16
    x, residual = randn(num_rows, dim, dtype=dtype), randn(num_rows, dim, dtype=dtype)
    weight, total = torch.rand(dim, device=DEVICE) + 0.5, x + residual
    normed = ops.rms_norm(total, weight, 1e-6)
    assert_close(normed.cpu(), exact_norm(total, weight, 1e-6), dtype)
    ops.fused_add_rms_norm(x, residual, weight, 1e-6)
    assert same_bits(residual, total) and same_bits(x, normed)


@pytest.mark.parametrize("dim", [63, 576])
def test_as_many_tokens_as_a_prefill_has(ops, dim):
    num_tokens, dtype = 8192, torch.bfloat16
    x, residual = randn(num_tokens, dim, dtype=dtype), randn(num_tokens, dim, dtype=dtype)
    weight, out = torch.rand(dim, device=DEVICE) + 0.5, Guarded(num_tokens, dim, dtype=dtype)
    ops.rms_norm(x, weight, 1e-6, out=out.tensor)
    assert_close(out.read(), exact_norm(x, weight, 1e-6), dtype)
    activated = Guarded(num_tokens, dim, dtype=dtype)
    both = torch.cat((x, residual), -1)
    ops.silu_and_mul(both, out=activated.tensor)
    expected = torch_ops.silu_and_mul(both.cpu())
    torch.testing.assert_close(activated.read(), expected, rtol=2 * RTOL[dtype], atol=1e-6)
    ids = torch.randint(0, num_tokens, (num_tokens,), device=DEVICE)
    copied = Guarded(num_tokens, dim, dtype=dtype)
    ops.embedding(ids, x, out=copied.tensor)
    assert same_bits(copied.read(), x[ids].cpu())
    total = x + residual
    ops.fused_add_rms_norm(x, residual, weight, 1e-6)
    assert same_bits(residual, total) and same_bits(x, ops.rms_norm(total, weight, 1e-6))


def test_nan_stays_in_its_row(ops):
    x = randn(3, 4096, dtype=torch.bfloat16)
    x[1, 77] = torch.nan
    normed = ops.rms_norm(x, torch.ones(4096, device=DEVICE), 1e-6)
    assert normed.isnan().sum(-1).tolist() == [0, 4096, 0]


# ---------------------------------------------------------------- rotary embedding


def cos_sin(rotary_dim: int, num_positions: int = 5000) -> Tensor:
    frequency = 1e6 ** -(torch.arange(0, rotary_dim, 2, device=DEVICE) / rotary_dim)
    angle = torch.arange(num_positions, device=DEVICE)[:, None] * frequency
    return torch.cat((angle.cos(), angle.sin()), -1)


def split_qkv(qkv: Tensor, head_dim: int) -> tuple[Tensor, Tensor]:
    """Five heads of q and two of k, of ten; views."""
    heads = qkv.unflatten(-1, (-1, head_dim))
    return heads[:, :5], heads[:, 5:7]


ROTARY_SHAPES = [
    (64, 64), (128, 128), (256, 256), (128, 64), (80, 80), (80, 20), (256, 64), (192, 128), (8, 2)
]  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("is_neox", [True, False])
@pytest.mark.parametrize(("head_dim", "rotary_dim"), ROTARY_SHAPES)
def test_rotation_in_place_of_views_of_qkv(ops, dtype, is_neox, head_dim, rotary_dim):
    cache = cos_sin(rotary_dim)
    for num_tokens in TOKENS:
        qkv = randn(num_tokens, 10 * head_dim, dtype=dtype)
        positions = torch.randint(0, len(cache), (num_tokens,), device=DEVICE)
        expected = qkv.cpu().float()
        torch_ops.rotary_embedding(
            positions.cpu(), *split_qkv(expected, head_dim), cache.cpu(), is_neox
        )
        untouched, misaligned = qkv.clone(), apart(qkv, 3)
        ops.rotary_embedding(positions, *split_qkv(qkv, head_dim), cache, is_neox)
        ops.rotary_embedding(positions, *split_qkv(misaligned, head_dim), cache, is_neox)
        # Terms may cancel: the error is that of the terms, at most some units of them.
        assert_close(qkv.cpu(), expected.double(), dtype, atol=2e-6)
        assert same_bits(misaligned, qkv)
        rest = [t.unflatten(-1, (-1, head_dim))[:, :7, rotary_dim:] for t in (qkv, untouched)]
        assert same_bits(*rest)
        assert same_bits(qkv[:, 7 * head_dim :], untouched[:, 7 * head_dim :])


def test_query_alone_and_positions_outside_the_cache(ops):
    query, cache = randn(4, 3, 64, dtype=torch.bfloat16), cos_sin(32, 10)
    expected = query.cpu()
    positions = torch.tensor([9, 10, -1, 0], device=DEVICE)
    ops.rotary_embedding(positions, query, None, cache)
    torch_ops.rotary_embedding(torch.tensor([9, 0]), expected[[0, 3]], None, cache.cpu())
    assert not query[[0, 3]].isnan().any() and not query[..., 32:].isnan().any()
    assert bool(query[1:3, :, :32].isnan().all())


def test_as_many_positions_as_a_prefill_has(ops):
    qkv, cache = randn(8192, 640, dtype=torch.bfloat16), cos_sin(64, 8192)
    positions, expected, fused = torch.arange(8192, device=DEVICE), qkv.cpu().float(), qkv.clone()
    weight = torch.rand(64, device=DEVICE) + 0.5
    ops.rotary_embedding(positions, *split_qkv(qkv, 64), cache)
    torch_ops.rotary_embedding(positions.cpu(), *split_qkv(expected, 64), cache.cpu())
    assert_close(qkv.cpu(), expected.double(), torch.bfloat16, atol=2e-6)
    in_two = fused.clone()
    for heads in split_qkv(in_two, 64):
        ops.rms_norm(heads, weight, 1e-6, out=heads)
    ops.rotary_embedding(positions, *split_qkv(in_two, 64), cache)
    ops.qk_norm_rotary(positions, *split_qkv(fused, 64), weight, weight, cache, 1e-6)
    assert same_bits(fused, in_two)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("is_neox", [True, False])
@pytest.mark.parametrize(("head_dim", "rotary_dim"), ROTARY_SHAPES)
def test_norm_and_rotation_in_one_equal_the_two(ops, dtype, is_neox, head_dim, rotary_dim):
    cache = cos_sin(rotary_dim)
    weights = [torch.rand(head_dim, device=DEVICE) + 0.5 for _ in range(2)]
    for num_tokens in TOKENS:
        fused = randn(num_tokens, 10 * head_dim, dtype=dtype)
        apart_, in_two = apart(fused, 5), fused.clone()
        positions = torch.randint(0, len(cache), (num_tokens,), device=DEVICE)
        for heads, weight in zip(split_qkv(in_two, head_dim), weights):
            ops.rms_norm(heads, weight, 1e-6, out=heads)
        ops.rotary_embedding(positions, *split_qkv(in_two, head_dim), cache, is_neox)
        for qkv in (fused, apart_):
            ops.qk_norm_rotary(positions, *split_qkv(qkv, head_dim), *weights, cache, 1e-6, is_neox)
            assert same_bits(qkv, in_two)


@pytest.mark.parametrize("has_norms", [True, False])
@pytest.mark.parametrize("is_fp8", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(64, 64), (128, 128), (256, 64), (80, 80)])
def test_k_and_v_go_to_the_cache_as_the_writer_after_the_rotation_puts_them(
    ops, dtype, is_fp8, has_norms, head_dim, rotary_dim
):
    kernels = pytest.importorskip("vllm.kernels.triton.attention")
    cache, block_size = cos_sin(rotary_dim), 16
    norms = tuple(torch.rand(head_dim, device=DEVICE) + 0.5 for _ in range(2))
    stored = torch.float8_e4m3fn if is_fp8 else dtype
    scales = (0.03, 0.07) if is_fp8 else (1.0, 1.0)
    for num_tokens in TOKENS:
        # Query heads, then two of keys and two of values.
        qkv = randn(num_tokens, 10, head_dim, dtype=dtype) * 20
        query, key, value = qkv.split((6, 2, 2), 1)
        positions = torch.randint(0, len(cache), (num_tokens,), device=DEVICE)
        shape = (-(-num_tokens // block_size) + 1, block_size, 2, head_dim)
        slots = torch.randperm(shape[0] * block_size, device=DEVICE)[:num_tokens]
        slots[:1] = -1
        caches = [torch.zeros(shape, device=DEVICE).to(stored) for _ in range(4)]
        rotated, keys = query.clone(), key.clone()
        if has_norms:
            ops.qk_norm_rotary(positions, rotated, keys, *norms, cache, 1e-6)
        else:
            ops.rotary_embedding(positions, rotated, keys, cache)
        kernels.reshape_and_cache(keys, value, *caches[:2], slots, *scales)
        before = key.clone()
        target = CacheTarget(value, *caches[2:], slots, *scales)
        ops.rotary_into_cache(
            positions, query, key, target, cache, norms if has_norms else None, 1e-6
        )
        assert same_bits(query, rotated) and same_bits(key, before)
        assert same_bits(caches[0], caches[2]) and same_bits(caches[1], caches[3])


# ---------------------------------------------------------------- SiLU, embedding


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 8, 100, 1536, 12288])
def test_silu_and_mul(ops, dtype, size):
    for num_tokens in TOKENS if size < 5000 else (1, 33):
        x = randn(num_tokens, 2 * size, dtype=dtype) * 10
        out = Guarded(num_tokens, size, dtype=dtype)
        assert ops.silu_and_mul(x, out=out.tensor) is out.tensor
        gate, up = x.cpu().double().chunk(2, -1)
        assert_close(out.read(), gate / (1 + torch.exp(-gate)) * up, dtype, atol=1e-6)
        torch.testing.assert_close(
            out.read(), torch_ops.silu_and_mul(x.cpu()), rtol=2 * RTOL[dtype], atol=1e-6
        )
        assert same_bits(ops.silu_and_mul(apart(x, 3)), out.tensor)


def test_silu_of_extremes_is_that_of_torch(ops):
    gate = torch.tensor([-torch.inf, -1e30, -200, -100, -88, 0, 88, 1e30, torch.inf, torch.nan])
    x = torch.cat((gate, torch.ones(10)))[None]
    given = ops.silu_and_mul(x.to(DEVICE)).cpu()
    torch.testing.assert_close(given, torch_ops.silu_and_mul(x), equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 8, 100, 4096])
def test_embedding_copies_rows_and_marks_unknown_ids(ops, dtype, size):
    weight = randn(1000, size, dtype=dtype)
    for num_tokens in TOKENS:
        ids = torch.randint(0, 1000, (num_tokens,), device=DEVICE)
        out = Guarded(num_tokens, size, dtype=dtype)
        assert ops.embedding(ids, weight, out=out.tensor) is out.tensor
        assert same_bits(out.read(), weight[ids].cpu())
        assert same_bits(ops.embedding(ids, apart(weight, 3)), out.tensor)
    rows = ops.embedding(torch.tensor([-1, 1000, 999], device=DEVICE), weight)
    assert rows.isnan().sum(-1).tolist() == [size, size, 0]


# ---------------------------------------------------------------- all of them


def test_graphs_replay_every_op_on_new_values(ops):
    names = ("rms_norm", "fused", "rotary", "qk", "silu", "embedding", "sample")
    x, residual = (randn(5, 512, dtype=torch.bfloat16) for _ in range(2))
    weight = torch.rand(512, device=DEVICE)
    qkv, cache = randn(5, 640, dtype=torch.bfloat16), cos_sin(64)
    positions, ids = torch.arange(5, device=DEVICE), torch.arange(5, device=DEVICE)
    draws = torch.rand(5, dtype=torch.float64, device=DEVICE)
    logits, ones = randn(5, 3000, dtype=torch.float32), torch.ones(5, device=DEVICE)
    inputs = (x, residual, qkv, positions, ids, draws, logits)

    def run() -> list[Tensor]:
        a, b, c = x.clone(), residual.clone(), qkv.clone()
        ops.fused_add_rms_norm(a, b, weight, 1e-6)
        ops.rotary_embedding(positions, *split_qkv(c, 64), cache)
        ops.qk_norm_rotary(positions, *split_qkv(c, 64), weight[:64], weight[:64], cache, 1e-6)
        top_k = torch.full((5,), 40, device=DEVICE)
        tokens = ops.sample_tokens(logits, ones, top_k, ones * 0.9, ones * 0.01, draws)
        return [
            ops.rms_norm(b, weight, 1e-6), a, b, c, ops.silu_and_mul(a), ops.embedding(ids, x),
            tokens,
        ]  # fmt: skip

    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run()
    for tensor in inputs:
        tensor.copy_(tensor.flip(0))
    graph.replay()
    for name, given, expected in zip(names, captured, run(), strict=True):
        assert same_bits(given, expected), name


REFUSALS = [
    ("rms_norm", 0, lambda t: t.cpu(), "x: given a tensor of DLPack device type"),
    ("rms_norm", 0, lambda t: t.double(), "x: given float64; accepted: float32"),
    ("rms_norm", 0, lambda t: t.T.contiguous().T, "x: given a last dimension with stride"),
    ("rms_norm", 1, lambda t: t.bfloat16(), "weight: given bfloat16; accepted: float32"),
    ("rms_norm", 1, lambda t: t[1:], "weight: given shape"),
    ("rms_norm", 2, lambda _: -1.0, "eps: given -1"),
    ("rms_norm", 3, lambda t: t[:1], "out: given shape"),
    ("rms_norm", 3, lambda t: t.float(), "out: given float32; accepted: the type of x"),
    ("rotary_embedding", 0, lambda t: t.int(), "positions: given int32"),
    ("rotary_embedding", 0, lambda t: t[1:], "positions: given shape"),
    ("rotary_embedding", 1, lambda t: t[0], "query: given shape"),
    ("rotary_embedding", 2, lambda t: t.half(), "key: given float16; accepted: the type of query"),
    ("rotary_embedding", 3, lambda t: t[:, :7].contiguous(), "cos_sin_cache: given 7 columns"),
    ("rotary_embedding", 3, lambda t: t.cpu(), "cos_sin_cache: given a tensor of DLPack"),
    ("silu_and_mul", 1, lambda t: t[:, 1:], r"x: given shape .*twice the columns of out"),
    ("embedding", 0, lambda t: t.int(), "ids: given int32; accepted: int64"),
    ("embedding", 2, lambda t: t[:, 1:], "out: given shape"),
    ("sample_tokens", 0, lambda t: t.half(), "logits: given float16; accepted: float32, bfloat16"),
    ("sample_tokens", 1, lambda t: t[1:], "temperature: given shape"),
    ("sample_tokens", 2, lambda t: t.int(), "top_k: given int32; accepted: int64"),
    ("sample_tokens", 5, lambda t: t.float(), "uniforms: given float32; accepted: float64"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "index", "change", "message"), REFUSALS)
def test_a_wrong_argument_is_named(ops, name, index, change, message):
    x, ones = randn(3, 64, dtype=torch.bfloat16), torch.ones(3, device=DEVICE)
    heads, ids = x.view(3, 4, 16), torch.arange(3, device=DEVICE)
    arguments = {
        "rms_norm": [x, torch.ones(64, device=DEVICE), 1e-6, torch.empty_like(x)],
        "rotary_embedding": [ids, heads, heads.clone(), cos_sin(16)],
        "silu_and_mul": [x, torch.empty_like(x[:, :32])],
        "embedding": [ids, x, torch.empty_like(x)],
        "sample_tokens": [x.float(), ones, ids, ones, ones, ones.double()],
    }[name]
    getattr(ops, name)(*arguments)
    arguments[index] = change(arguments[index])
    with pytest.raises(ValueError, match=message):
        getattr(ops, name)(*arguments)
