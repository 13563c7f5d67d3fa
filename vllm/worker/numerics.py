"""Logits that are not finite: found in every step, and traced to a layer on request."""

from typing import Any

import torch
from torch import Tensor, nn

from vllm.distributed.groups import own_part
from vllm.kernels.activations import UnaddedRows

BROKEN = -1
"""In place of a token: the logits it should come from were NaN or infinite."""


def mark_broken(logits: Tensor, tokens: Tensor) -> Tensor:
    """tokens int64 [S] with BROKEN where the logit of the token is not finite.

    One NaN makes a whole row of hidden states NaN, and sampling takes NaN and infinity for the
    largest logit: so looking at the logit that was taken is enough.
    """
    taken = logits.gather(1, tokens[:, None])[:, 0]
    # isfinite would be twice as many kernels; a NaN is less than nothing.
    return torch.where(taken.abs() < torch.inf, tokens, BROKEN)


class NumericsWatch:
    """Notes the first module of a step whose output is not finite. Waits for every module.

    first: its name and class, None if all were finite since `reset`.
    """

    def __init__(self, model: nn.Module):
        self.first: str | None = None
        for name, module in model.named_modules():
            module.register_forward_hook(self._hook(name or "the model"))

    def reset(self) -> None:
        self.first = None

    def _hook(self, name: str) -> Any:
        def look(module: nn.Module, inputs: Any, output: Any) -> None:
            if self.first is None and _is_broken(output):
                self.first = f"{name} ({type(module).__name__})"

        return look


def _is_broken(output: Any) -> bool:
    values = output.total() if isinstance(output, UnaddedRows) else own_part(output)
    return (
        isinstance(values, Tensor)
        and values.is_floating_point()
        and not bool(values.isfinite().all())
    )
