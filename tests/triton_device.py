"""Where tests of Triton kernels run: on a GPU, or with TRITON_INTERPRET=1 in Triton's interpreter,
which is a process of its own (`tests/kernels/test_triton_interpreted.py`).
"""

import os

import pytest
import torch

pytest.importorskip("triton")

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if IS_INTERPRETED else "cuda"
MARKS = [
    pytest.mark.gpu,
    pytest.mark.skipif(not IS_INTERPRETED and not torch.cuda.is_available(), reason="needs a GPU"),
]
# To E4M3 a GPU saturates; bfloat16 has infinities.
_MOST = {torch.bfloat16: float("inf"), torch.float8_e4m3fn: 448.0}
needs_gpu = pytest.mark.skipif(IS_INTERPRETED, reason="not in the interpreter")


def _mend_interpreter() -> None:
    """Where Triton 3.9's computes something else than a GPU. The comparison of two numbers, spread
    over a block, becomes a block of int32, which its loads and stores do not take as a mask.
    Products of bfloat16 are those of its bits, read as whole numbers. float32 is cut off, not
    rounded, to bfloat16; and rounded to E4M3 wrongly where that carries into the exponent."""
    import numpy as np
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder as Builder
    from triton.runtime.interpreter import TensorHandle

    spread, multiply = Builder.create_splat, Builder.create_dot
    cast, convert = Builder.cast_impl, Builder.create_fp_to_fp

    def create_splat(self, block, x):
        handle = spread(self, block, x)
        return TensorHandle(handle.data.astype(x.data.dtype), handle.dtype)

    def widened(x):
        if x.dtype.scalar != tl.bfloat16:
            return x
        return TensorHandle((x.data.astype(np.uint32) << 16).view(np.float32), tl.float32)

    def create_dot(self, a, b, *args):
        return multiply(self, widened(a), widened(b), *args)

    def rounded(x, kind, bits, numpy_bits):
        values = torch.from_numpy(np.array(x.data)).clamp(-_MOST[kind], _MOST[kind])
        return values.to(kind).view(bits).numpy().view(numpy_bits)

    def cast_impl(self, x, kind):
        if x.dtype.scalar == tl.float32 and kind.scalar == tl.bfloat16:
            return TensorHandle(rounded(x, torch.bfloat16, torch.int16, np.uint16), tl.bfloat16)
        return cast(self, x, kind)

    def create_fp_to_fp(self, x, kind, rounding):
        if x.dtype.scalar == tl.float32 and kind.scalar == tl.float8e4nv:
            data = rounded(x, torch.float8_e4m3fn, torch.uint8, np.uint8)
            return TensorHandle(data, tl.float8e4nv)
        return convert(self, x, kind, rounding)

    Builder.create_splat, Builder.create_dot = create_splat, create_dot
    Builder.cast_impl, Builder.create_fp_to_fp = cast_impl, create_fp_to_fp


if IS_INTERPRETED:
    _mend_interpreter()
