"""Which kernels the user asks for."""

from dataclasses import dataclass

from vllm import envs
from vllm.kernels.registry import check_backend_name
from vllm.kernels.spec import Origin, Override, Policy


@dataclass(frozen=True)
class KernelConfig:
    """linear_backend: the backend of every linear layer; None lets the selector choose."""

    linear_backend: str | None = None

    def __post_init__(self) -> None:
        if self.linear_backend is not None:
            check_backend_name("linear", self.linear_backend, "--linear-backend")

    def policy(self) -> Policy:
        """What was asked for, as the selector takes it; the flag ranks above the variable."""
        overrides = []
        if self.linear_backend is not None:
            flag = Origin(2, f"--linear-backend {self.linear_backend}")
            overrides.append(Override("linear", self.linear_backend, flag))
        if (name := envs.VLLM_LINEAR_BACKEND) is not None:
            check_backend_name("linear", name, "VLLM_LINEAR_BACKEND")
            variable = Origin(3, f"VLLM_LINEAR_BACKEND={name}")
            overrides.append(Override("linear", name, variable))
        return Policy(tuple(overrides))
