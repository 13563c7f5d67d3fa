"""Quantising a layer's input to FP8 (E4M3)."""

import torch
from torch import Tensor, nn

from vllm.ops.fp8 import quantise_groups
from vllm.ops.fp8_quant import ScaleLayout, laid_out, per_token_group_fp8_quant, scaled_fp8_quant
from vllm.utils.deep_gemm import is_deep_gemm_e8m0_used
from vllm.utils.fp8 import MIN_AMAX, GroupShape, fp8_scales, round_to_fp8


class QuantFP8(nn.Module):
    """x [M, K] -> (q float8_e4m3fn [M, K], float32 scales), x ~ q * scale.

    static: the scale comes with the call, one for the tensor, and is returned as it is. Otherwise
    group_shape says which elements share one: PER_TENSOR (scale [1]), PER_TOKEN ([M, 1]) or
    GroupShape(1, n) ([M, ceil(K / n)], in the layout that column_major_scales, tma_aligned_scales
    and use_ue8m0 ask for: per_token_group_quant_fp8). num_token_padding: q has at least so many
    rows, zeros after the M-th; scales are for M. Other combinations are a ValueError.
    """

    def __init__(
        self,
        static: bool,
        group_shape: GroupShape,
        num_token_padding: int | None = None,
        column_major_scales: bool = False,
        tma_aligned_scales: bool = False,
        use_ue8m0: bool | None = None,
    ):
        super().__init__()
        self.static = static
        self.group_shape = group_shape = GroupShape(*group_shape)
        self.num_token_padding = num_token_padding
        self.layout = ScaleLayout.of(column_major_scales, tma_aligned_scales)
        self.is_group = group_shape[0] == 1 and group_shape[1] > 0
        if static and self.group_shape != GroupShape.PER_TENSOR:
            raise ValueError(f"a static quantiser takes GroupShape.PER_TENSOR, not {group_shape}")
        if not self.is_group and group_shape not in (GroupShape.PER_TENSOR, GroupShape.PER_TOKEN):
            raise ValueError(
                f"activations are quantised by GroupShape.PER_TENSOR, GroupShape.PER_TOKEN or "
                f"GroupShape(1, n), not {group_shape}"
            )
        if not self.is_group and (column_major_scales or tma_aligned_scales or use_ue8m0):
            raise ValueError(
                "column_major_scales, tma_aligned_scales and use_ue8m0 are for groups: they take "
                "a group_shape such as GroupShape(1, 128)"
            )
        if self.is_group and use_ue8m0 is None:
            use_ue8m0 = is_deep_gemm_e8m0_used()
        self.use_ue8m0 = bool(use_ue8m0)

    def forward(self, x: Tensor, scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
        self._check_scale(scale)
        if not self.is_group:
            is_per_token = self.group_shape == GroupShape.PER_TOKEN
            padding = self.num_token_padding
            return scaled_fp8_quant(x, scale, padding, use_per_token_if_dynamic=is_per_token)
        columns, scale_form = self.group_shape.col, (self.layout, self.use_ue8m0)
        return self._padded(*per_token_group_fp8_quant(x, columns, MIN_AMAX, *scale_form))

    def forward_native(self, x: Tensor, scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The reference, in torch on any device."""
        self._check_scale(scale)
        if self.is_group:
            q, scales = quantise_groups(x, self.group_shape.col, use_ue8m0=self.use_ue8m0)
            return self._padded(q, laid_out(scales, self.layout))
        if scale is None:
            magnitude = x.float().abs()
            is_per_token = self.group_shape == GroupShape.PER_TOKEN
            amax = magnitude.amax(-1, keepdim=True) if is_per_token else magnitude.amax().view(1)
            scale = fp8_scales(amax.clamp(min=MIN_AMAX))
        return self._padded(round_to_fp8(x, scale), scale)

    def _check_scale(self, scale: Tensor | None) -> None:
        if self.static != (scale is not None):
            raise ValueError(
                "a static quantiser needs its scale at every call"
                if self.static
                else "a dynamic quantiser computes its scales: leave `scale` out"
            )

    def _padded(self, q: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
        missing = max(0, (self.num_token_padding or 0) - q.shape[0])
        if missing:
            q = torch.cat([q, q.new_zeros(missing, *q.shape[1:])])
        return q, scales
