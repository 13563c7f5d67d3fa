"""The native kernels that quantise and multiply FP8 and NVFP4, as torch custom ops."""

from vllm.kernels import registry
from vllm.kernels.select.spec import KernelSpec
from vllm.machine import Device, DeviceCapability
from vllm.ops.fp4_ops import scaled_fp4_quant as scaled_fp4_quant
from vllm.ops.fp8_quant import scaled_fp8_quant as scaled_fp8_quant
from vllm.ops.gemm_ops import cutlass_scaled_fp4_mm as cutlass_scaled_fp4_mm
from vllm.ops.gemm_ops import cutlass_scaled_mm as cutlass_scaled_mm
from vllm.platforms import native


def cutlass_scaled_mm_supports_fp8(cuda_device_capability: int) -> bool:
    """Whether `cutlass_scaled_mm` takes scales per tensor and channel on a chip, such as 90: by
    torch's GEMM, whatever this build holds."""
    device = Device("cuda", DeviceCapability.parse(cuda_device_capability))
    return any(
        {device.family, device.arch} & spec.devices and "fp8-tensor" in spec.formats
        for spec in _specs("scaled_mm")
    )


def cutlass_scaled_mm_supports_block_fp8(cuda_device_capability: int) -> bool:
    """Whether this build has the 128x128-block FP8 GEMM for a chip, such as 90."""
    return _is_built_for("fp8-block", cuda_device_capability)


def cutlass_scaled_mm_supports_fp4(cuda_device_capability: int) -> bool:
    """Whether this build has the NVFP4 GEMM for a chip, such as 100."""
    return _is_built_for("nvfp4", cuda_device_capability)


def _is_built_for(weight_format: str, capability: int) -> bool:
    """Whether one of the native kernels of the CUTLASS backend for this format serves the chip."""
    try:
        built = native.gpu_archs()
    except native.NativeLibraryError:
        return False
    device = Device("cuda", DeviceCapability.parse(capability))
    specs = [spec for spec in _specs("cutlass") if weight_format in spec.formats]
    archs = [arch for spec in specs for kernel in spec.native for arch in built.get(kernel, ())]
    return any(device.runs(arch) for arch in archs if arch[0].isdigit())


def _specs(backend: str) -> list[KernelSpec]:
    return [spec for spec in registry.specs("linear") if spec.backend == backend]
