"""Model operations on the native CPU kernels (contract: `vllm.ops`).

Importing this module loads the library and raises `NativeLibraryError` if it cannot.
Wrong arguments raise ValueError naming the argument, what was given and what is accepted.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from vllm.ops.moe_router import choose_experts as choose_experts
from vllm.ops.native_ops import NativeOps
from vllm.ops.torch_delta_net import causal_conv1d as _biased_causal_conv1d
from vllm.ops.torch_mamba2 import mamba2_scan as mamba2_scan
from vllm.ops.torch_mamba2 import relu2 as relu2
from vllm.ops.torch_mamba2 import silu_mul_rms_norm as silu_mul_rms_norm
from vllm.platforms import native

_ops = NativeOps("")
rms_norm, fused_add_rms_norm = _ops.rms_norm, _ops.fused_add_rms_norm
rotary_embedding, silu_and_mul = _ops.rotary_embedding, _ops.silu_and_mul
sample_tokens = _ops.sample_tokens
_library = native.load()
_linear_pack = _library.linear_pack
_linear_pack_codes = _library.linear_pack_codes
_linear = _library.linear
_swigluoai_and_mul = _library.swigluoai_and_mul
_rms_norm_gated = _library.rms_norm_gated
_mul_sigmoid = _library.mul_sigmoid
_gelu_and_mul = _library.gelu_and_mul
_soft_cap = _library.soft_cap
_causal_conv1d = _library.causal_conv1d
_gated_delta_rule = _library.gated_delta_rule
_reshape_and_cache = _library.reshape_and_cache
_paged_attention = _library.paged_attention

USES_TORCH_THREADS = False
LOGIT_DTYPES = (torch.float32,)
PANEL_WIDTH = 32
# E4M3 codes are widened as fp16 bit patterns, whose exponent is biased by eight more.
_E4M3_FACTOR = 256.0
_E4M3 = torch.float8_e4m3fn
_WEIGHT_DTYPES = (torch.float32, torch.bfloat16, torch.float16, _E4M3, torch.int8)
_QUAD_ROWS, _QUAD_BYTES = 4, 64
_STORED_WHOLE, _INT4, _INT4_WITH_ZERO_POINTS, _E2M1 = range(4)


@dataclass(frozen=True, slots=True)
class LinearWeight:
    """A linear layer in the layout of the kernels; made by `pack_linear`."""

    panels: Tensor  # [ceil(n / 32), k, 32] in the weight's type (uint8 for E4M3), or of codes of 4
    # bits uint8 [ceil(n / 32), quads, 64] (csrc/cpu/linear_pack.h)
    scales: Tensor  # [ceil(n / 32), num_k_blocks, 32] float32, or smaller floats of the same values
    bias: Tensor  # [ceil(n / 32) * 32] float32
    block_k: int
    num_outputs: int
    num_inputs: int
    code_type: int = _STORED_WHOLE
    scale_factors: Tensor | None = None  # [ceil(n / 32) * 32] float32, multiplied with scales
    zero_points: Tensor | None = None  # uint8, of scales' shape

    @property
    def num_bytes(self) -> int:
        """Bytes that a product reads of this layer."""
        parts = (self.panels, self.scales, self.bias, self.scale_factors, self.zero_points)
        return sum(part.nbytes for part in parts if part is not None)


def pack_linear(
    weight: Tensor,
    row_scales: Tensor | None = None,
    block_k: int | None = None,
    bias: Tensor | None = None,
) -> LinearWeight:
    """Packs `weight` [n, k] (float32, bfloat16, float16, float8_e4m3fn or int8) once, at load.

    The layer's weight is `weight[i, j] * row_scales[i, j // block_k]`; `row_scales` is float32
    [n, ceil(k / block_k)], None for 1, and `block_k` defaults to k (one scale per row). `bias` is
    float32 [n]. Needs memory for one copy of the weight.

    Raises ValueError for other shapes or types, and for an E4M3 weight with NaN codes.
    """
    if weight.dim() != 2 or weight.dtype not in _WEIGHT_DTYPES:
        raise ValueError(
            f"weight: given {weight.dtype} of shape {list(weight.shape)}; accepted: [n, k] in "
            f"{', '.join(str(dtype) for dtype in _WEIGHT_DTYPES)}"
        )
    n, k = weight.shape
    block_k = max(k, 1) if block_k is None else block_k
    if block_k < 1:
        raise ValueError(f"block_k: given {block_k}; accepted: 1 or more")
    num_panels = -(-n // PANEL_WIDTH)
    num_k_blocks = -(-k // block_k)
    is_e4m3 = weight.dtype == _E4M3
    if is_e4m3:
        weight = weight.view(torch.uint8)
    panels = torch.empty((num_panels, k, PANEL_WIDTH), dtype=weight.dtype)
    num_nans = _linear_pack(weight, panels)
    if num_nans:
        raise ValueError(
            f"weight: given {num_nans} E4M3 NaN codes (0x7F or 0xFF); accepted: finite values "
            "(the checkpoint is damaged, or its type is not float8_e4m3fn)"
        )
    if row_scales is None:
        row_scales = torch.ones(n, num_k_blocks)
    else:
        _check("row_scales", row_scales, torch.float32, (n, num_k_blocks))
    if is_e4m3:
        row_scales = row_scales * _E4M3_FACTOR
    elif weight.dtype == torch.int8:  # has scales of groups, which are many
        row_scales = _narrowed(row_scales)
    return LinearWeight(panels, _in_panels(row_scales), _padded("bias", bias, n), block_k, n, k)


def pack_linear_codes(
    codes: Tensor,
    row_scales: Tensor,
    block_k: int,
    bias: Tensor | None = None,
    zero_points: Tensor | None = None,
    row_factors: Tensor | None = None,
    is_e2m1: bool = False,
) -> LinearWeight:
    """Packs a weight of 4-bit codes once, at load; it stays 4 bits and is widened in registers.

    `codes` uint8 [n, k / 2], the even column in the low nibble: E2M1 where `is_e2m1`, else int4,
    which counts code - 8, or code - `zero_points` (uint8 [n, ceil(k / block_k)], 0 to 15). The
    layer's weight is that times `row_scales[i, j // block_k]`, float32 or float8_e4m3fn, times
    `row_factors[i]` (float32 [n]; None for 1). Float32 scales are kept in 16 bits where that is
    exact. `bias` is float32 [n].

    Raises ValueError for other shapes or types, and for scales that are NaN in E4M3.
    """
    if codes.dim() != 2 or codes.dtype != torch.uint8:
        raise ValueError(
            f"codes: given {codes.dtype} of shape {list(codes.shape)}; accepted: [n, k / 2] in "
            "torch.uint8"
        )
    n, k = codes.shape[0], 2 * codes.shape[1]
    if block_k < 1:
        raise ValueError(f"block_k: given {block_k}; accepted: 1 or more")
    num_k_blocks = -(-k // block_k)
    is_e4m3 = row_scales.dtype == torch.float8_e4m3fn
    _check("row_scales", row_scales, _E4M3 if is_e4m3 else torch.float32, (n, num_k_blocks))
    if is_e4m3:
        if bool((row_scales.view(torch.uint8) & 0x7F == 0x7F).any()):
            raise ValueError("row_scales: given E4M3 NaN codes; accepted: finite values")
        row_factors = (torch.ones(n) if row_factors is None else row_factors) * _E4M3_FACTOR
        row_scales = row_scales.view(torch.uint8)
    else:
        row_scales = _narrowed(row_scales)
    if zero_points is not None:
        if is_e2m1:
            raise ValueError("zero_points: given with E2M1 codes; accepted: with int4 alone")
        _check("zero_points", zero_points, torch.uint8, (n, num_k_blocks))
    if row_factors is not None:
        row_factors = _padded("row_factors", row_factors, n)
    quads_of = [-(-rows // _QUAD_ROWS) for rows in (block_k, k % block_k)]
    num_quads = k // block_k * quads_of[0] + quads_of[1]
    panels = torch.empty((-(-n // PANEL_WIDTH), num_quads, _QUAD_BYTES), dtype=torch.uint8)
    _linear_pack_codes(codes, panels, block_k)
    return LinearWeight(
        panels,
        _in_panels(row_scales),
        _padded("bias", bias, n),
        block_k,
        n,
        k,
        _E2M1 if is_e2m1 else _INT4 if zero_points is None else _INT4_WITH_ZERO_POINTS,
        row_factors,
        None if zero_points is None else _in_panels(zero_points),
    )


def _in_panels(of_rows: Tensor) -> Tensor:
    """[n, blocks] -> [ceil(n / 32), blocks, 32], with zeros for the rows that fill a panel."""
    num_missing = -len(of_rows) % PANEL_WIDTH
    padded = torch.cat((of_rows, of_rows.new_zeros((num_missing, of_rows.shape[1]))))
    return padded.view(-1, PANEL_WIDTH, of_rows.shape[1]).transpose(1, 2).contiguous()


def _padded(name: str, of_rows: Tensor | None, n: int) -> Tensor:
    """float32 [n] -> [ceil(n / 32) * 32], with zeros for None and in the rows that fill a panel."""
    padded = torch.zeros(-(-n // PANEL_WIDTH) * PANEL_WIDTH)
    if of_rows is not None:
        _check(name, of_rows, torch.float32, (n,))
        padded[:n] = of_rows
    return padded


def _narrowed(scales: Tensor) -> Tensor:
    """In 16 bits where every value stays the same, as those of most checkpoints do."""
    for dtype in (torch.bfloat16, torch.float16):
        narrow = scales.to(dtype)
        if torch.equal(narrow.float(), scales):
            return narrow
    return scales


def linear(x: Tensor, packed: LinearWeight, out: Tensor | None = None) -> Tensor:
    """x [m, k] -> [m, n] = x @ weight.T + bias, accumulated in float32.

    Rows of `x` and `out` may be apart; their last dimension is contiguous.
    """
    if out is None:
        out = x.new_empty((x.shape[0], packed.num_outputs))
    _linear(
        x,
        packed.panels,
        packed.scales,
        packed.bias,
        out,
        packed.block_k,
        packed.code_type,
        packed.scale_factors,
        packed.zero_points,
    )
    return out


def pack_heads(weights: Tensor) -> list[LinearWeight]:
    """Packs `weights` [heads, k, n] of one product per head."""
    return [pack_linear(weight.T.contiguous()) for weight in weights]


def linear_heads(x: Tensor, packed: Sequence[LinearWeight], out: Tensor | None = None) -> Tensor:
    """x [tokens, heads, k] -> [tokens, heads, n]: each head with its own weight. The last
    dimensions are contiguous."""
    if out is None:
        out = x.new_empty((*x.shape[:2], packed[0].num_outputs))
    for head, weight in enumerate(packed):
        linear(x[:, head], weight, out[:, head])
    return out


def rms_norm_gated(
    x: Tensor, gate: Tensor, weight: Tensor, eps: float, out: Tensor | None = None
) -> Tensor:
    """rms_norm(x, weight, eps) * silu(gate), rounded once; `gate` has the shape of `x`."""
    if out is None:
        out = x.new_empty(x.shape)
    _rms_norm_gated(x, gate, weight, out, eps)
    return out


def qk_norm_rotary(
    positions: Tensor,
    query: Tensor,
    key: Tensor,
    query_weight: Tensor,
    key_weight: Tensor,
    cos_sin_cache: Tensor,
    eps: float,
    is_neox: bool = True,
) -> None:
    """rms_norm of every head of query and of key in place, then rotary_embedding."""
    rms_norm(query, query_weight, eps, out=query)
    rms_norm(key, key_weight, eps, out=key)
    rotary_embedding(positions, query, key, cos_sin_cache, is_neox)


def gelu_and_mul(x: Tensor, approximate: str = "none", out: Tensor | None = None) -> Tensor:
    """x [tokens, 2 n] -> [tokens, n] = gelu(x[:, :n]) * x[:, n:]. approximate: `none`, to 1.5e-7 of
    the gate, or `tanh`."""
    if out is None:
        out = x.new_empty((x.shape[0], x.shape[1] // 2))
    _gelu_and_mul(x, out, approximate == "tanh")
    return out


def soft_cap(x: Tensor, softcap: float) -> None:
    """In place: x [tokens, n] = softcap * tanh(x / softcap), in float32."""
    _soft_cap(x, softcap)


def swigluoai_and_mul(x: Tensor, limit: float) -> Tensor:
    """x [tokens, 2 n] -> [tokens, n], as `vllm.architectures.decoder.SWIGLUOAI` says."""
    out = x.new_empty((x.shape[0], x.shape[1] // 2))
    _swigluoai_and_mul(x, out, limit)
    return out


def mul_sigmoid(x: Tensor, gate: Tensor) -> None:
    """In place: x [tokens, heads, dim] *= sigmoid(gate), gate of that shape or [..., 1].

    Both may have strides between tokens and heads.
    """
    _mul_sigmoid(x, gate)


def routed_experts(
    x: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    experts: Sequence[tuple[LinearWeight, LinearWeight]],
    activate: Callable[[Tensor], Tensor] = silu_and_mul,
) -> Tensor:
    """x [tokens, n] -> [tokens, n]: for each token the weighted sum of its experts' results.

    `topk_ids` int64 [tokens, k] are distinct indices into `experts`, the pairs of gate-up [2 i, n]
    and down [n, i]; an expert gives down(activate(gate_up(x))) in x's type. `topk_weights`
    float32 [tokens, k]. An id of -1 adds nothing. The sum is in float32, in the order of the
    columns.
    """
    num_tokens, top_k = topk_ids.shape
    chosen = topk_ids.flatten()
    by_expert = chosen.argsort(stable=True)
    num_absent, *counts = torch.bincount(chosen + 1, minlength=len(experts) + 1).tolist()
    absent, *rows_of = by_expert.split([num_absent, *counts])
    results = x.new_empty((num_tokens * top_k, x.shape[1]))
    results[absent] = 0
    for (gate_up, down), rows in zip(experts, rows_of, strict=True):
        if len(rows):
            results[rows] = linear(activate(linear(x[rows // top_k], gate_up)), down)
    total = torch.zeros(x.shape)
    # A product and a sum, each rounded: one fused operation may round as torch's vector or its
    # scalar loop does, and with that depend on where in the batch a token stands.
    for weight, result in zip(
        topk_weights.unbind(1), results.view(-1, top_k, x.shape[1]).unbind(1)
    ):
        total += result.float() * weight[:, None]
    return total.to(x.dtype)


def reshape_and_cache(
    key: Tensor,
    value: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> None:
    """Writes key and value [tokens, num_kv_heads, head_dim] into the paged cache.

    `slot_mapping` int64 [tokens] is block * block_size + offset, negative to skip the token; slots
    must differ. E4M3 caches store value / scale, saturated at 448.
    """
    if k_cache.dtype is torch.float8_e4m3fn:
        k_cache, v_cache = k_cache.view(torch.uint8), v_cache.view(torch.uint8)
    _reshape_and_cache(key, value, k_cache, v_cache, slot_mapping, k_scale, v_scale)


def paged_attention(
    query: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    scale: float,
    sliding_window: int = 0,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    out: Tensor | None = None,
    sinks: Tensor | None = None,
    softcap: float = 0.0,
    is_chunked: bool = False,
) -> Tensor:
    """Causal attention of query [tokens, num_heads, head_dim] over the paged cache.

    Request r owns query rows query_start_loc[r] to query_start_loc[r + 1] (int32 [requests + 1]),
    the last ones of its seq_lens[r] tokens (int32 [requests]), whose keys lie in the blocks
    block_tables[r] (int32 [requests, max_blocks]). A query at position p sees keys in
    (p - sliding_window, p], or [0, p] where the window is 0, or with is_chunked those of its own
    chunk: [p - p % sliding_window, p]. Rows of requests of no keys, which fill up a batch of a
    fixed size, become zeros. `sinks` float32 [num_heads]: of each head the
    logit of a key without a value, which every query sees. `softcap`: scaled scores become softcap
    * tanh(score / softcap); 0 for none.
    """
    if out is None:
        out = query.new_empty(query.shape)
    if k_cache.dtype is torch.float8_e4m3fn:
        k_cache, v_cache = k_cache.view(torch.uint8), v_cache.view(torch.uint8)
    batch = block_tables, query_start_loc, seq_lens
    scales = k_scale, v_scale
    variant = sinks, softcap, is_chunked
    _paged_attention(query, k_cache, v_cache, *batch, out, scale, sliding_window, *scales, *variant)
    return out


def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    state: Tensor,
    state_slots: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    out: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """silu of a convolution along the tokens of each request: x [tokens, channels] -> the same.

    out[t, c] = silu(bias[c] + sum over j of weight[j, c] * x[t - taps + 1 + j, c]), `weight`
    float32 [taps, channels], up to 8 taps, `bias` float32 [channels] or None. Where that reaches
    back before this step it reads `state` [slots, taps - 1, channels] in x's type, the last inputs
    of the request in slot `state_slots[r]` (int32 [requests]), and then leaves its own last inputs
    there. Requests are given as for `paged_attention`, each with at least one token; one with
    seq_lens[r] tokens in this step starts from zeros, whatever its slot holds. Slots of requests
    must differ.
    """
    if out is None:
        out = x.new_empty(x.shape)
    if bias is not None:  # the native kernel takes none
        requests = state_slots, query_start_loc, seq_lens
        return _biased_causal_conv1d(x, weight, state, *requests, out, bias)
    _causal_conv1d(x, weight, state, state_slots, query_start_loc, seq_lens, out)
    return out


def gated_delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    a: Tensor,
    b: Tensor,
    decay_rate: Tensor,
    dt_bias: Tensor,
    state: Tensor,
    state_slots: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    out: Tensor | None = None,
) -> Tensor:
    """The recurrence of Gated DeltaNet (arXiv 2412.06464) over the tokens of each request.

    `query`, `key` [tokens, key heads, key_dim]; `value` [tokens, value heads, value_dim], whose
    head h goes with key head h // (value heads / key heads); `a`, `b` [tokens, value heads];
    `decay_rate`, `dt_bias` float32 [value heads]. Per token and value head, in float32:

        q, k = query / |query| / sqrt(key_dim), key / |key|        (lengths sqrt(sum + 1e-6))
        S = exp(-decay_rate * softplus(a + dt_bias)) * S           S [key_dim, value_dim]
        S = S + k (outer product) sigmoid(b) * (value - S.T k)
        out = S.T q                                                out [tokens, value heads, ...]

    S is `state[state_slots[r], h]` (float32 [slots, value heads, key_dim, value_dim]), taken and
    left as `causal_conv1d` does with its own. Head sizes up to 256.
    """
    if out is None:
        out = value.new_empty(value.shape)
    requests = state_slots, query_start_loc, seq_lens
    _gated_delta_rule(query, key, value, a, b, decay_rate, dt_bias, state, *requests, out)
    return out


def _check(name: str, tensor: Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    if tensor.dtype != dtype or tensor.shape != shape:
        raise ValueError(
            f"{name}: given {tensor.dtype} of shape {list(tensor.shape)}; "
            f"accepted: {dtype} of shape {list(shape)}"
        )
