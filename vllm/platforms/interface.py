"""What a platform is. Standard library only, so that selection can be explained anywhere."""

from typing import Any

from vllm.machine import DeviceCapability


class Platform:
    """Questions about the current device that have the same form on every kind of device."""

    device_type: str = ""

    def get_device_capability(self) -> DeviceCapability | None:
        """CUDA capability of the current device; None where there is no such thing."""
        return None

    def has_device_capability(self, capability: int | tuple[int, int]) -> bool:
        """Capability at least `capability` (an order, not a family: 121 >= 100 is true)."""
        current = self.get_device_capability()
        return current is not None and current >= DeviceCapability.parse(capability)

    def is_device_capability(self, capability: int | tuple[int, int]) -> bool:
        """Capability exactly `capability`."""
        return self.get_device_capability() == DeviceCapability.parse(capability)

    def is_device_capability_family(self, capability: int | tuple[int, int]) -> bool:
        """Same family as `capability`: 120 and 121 match each other, 100 and 120 do not."""
        current = self.get_device_capability()
        return current is not None and current.family == DeviceCapability.parse(capability).family

    def is_cuda(self) -> bool:
        return self.device_type == "cuda"

    def is_cpu(self) -> bool:
        return self.device_type == "cpu"

    def fp8_dtype(self) -> Any:
        """torch dtype of FP8 tensors on this platform (no supported device uses FNUZ)."""
        import torch

        return torch.float8_e4m3fn

    def is_fp8_fnuz(self) -> bool:
        return False

    def support_deep_gemm(self) -> bool:
        """Whether this chip is one that DeepGEMM has kernels for, installed or not."""
        return self.is_device_capability(90) or self.is_device_capability_family(100)
