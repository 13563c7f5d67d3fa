"""DeepGEMM's interface as its README documents it, computed in torch on any device.

Refuses operands that are not laid out as documented; `calls` are the keyword arguments it got.
"""

import torch

__version__ = "0.1.3"
calls = []


def fp8_gemm_nt(a, b, d, c=None, recipe=None, disable_ue8m0_cast=False):
    calls.append({"disable_ue8m0_cast": disable_ue8m0_cast})
    assert c is None and recipe is None and d.dtype == torch.bfloat16 and d.is_contiguous()
    d.copy_(_widen(*a, 1) @ _widen(*b, 128).T)


def m_grouped_fp8_gemm_nt_contiguous(a, b, d, m_indices, disable_ue8m0_cast=False):
    assert m_indices.dtype == torch.int32 and len(m_indices) == len(d) and d.is_contiguous()
    wide = _widen(*a, 1)
    d.fill_(torch.nan)
    for expert, weight in enumerate(zip(*b, strict=True)):
        rows = m_indices == expert
        d[rows] = (wide[rows] @ _widen(*weight, 128).T).to(d.dtype)


def m_grouped_fp8_gemm_nt_masked(a, b, d, masked_m, expected_m, disable_ue8m0_cast=False):
    """Of rows that are not there the library promises nothing: NaN."""
    assert masked_m.dtype == torch.int32 and expected_m > 0 and d.is_contiguous()
    d.fill_(torch.nan)
    for count, x, weight, out in zip(masked_m.tolist(), zip(*a), zip(*b), d, strict=True):
        out[:count] = (_widen(*x, 1)[:count] @ _widen(*weight, 128).T).to(d.dtype)


def _widen(q, scales, block_rows):
    assert q.dtype == torch.float8_e4m3fn and q.is_contiguous() and q.shape[1] % 128 == 0
    num_rows, num_groups = q.shape[0], q.shape[1] // 128
    rows = range(num_rows)
    if scales.dtype == torch.int32:
        _check_mn_major(scales, num_rows)
        words = [[scales[i, j].item() for j in range(scales.shape[1])] for i in rows]
        values = [
            [2.0 ** ((row[g // 4] >> 8 * (g % 4) & 0xFF) - 127) for g in range(num_groups)]
            for row in words
        ]
    elif block_rows == 1:
        _check_mn_major(scales, num_rows)
        values = scales.tolist()
    else:
        assert scales.is_contiguous() and scales.shape == (-(-num_rows // 128), num_groups)
        values = [scales[i // 128].tolist() for i in rows]
    groups = q.double().view(num_rows, num_groups, 128)
    return (groups * torch.tensor(values, dtype=torch.float64).unsqueeze(-1)).flatten(1)


def _check_mn_major(scales, num_rows):
    assert scales.shape[0] == num_rows and scales.stride() == (1, -(-num_rows // 4) * 4)


def get_mk_alignment_for_contiguous_layout():
    return 128
