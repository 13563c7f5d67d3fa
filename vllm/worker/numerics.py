"""Non-finite logits: detected in every step, and traced to a layer with --debug-numerics."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from vllm.distributed.groups import own_part
from vllm.kernels.activations import QuantizedInput, UnaddedRows
from vllm.model_executor.layers.layernorm import RMSNorm

BROKEN = -1
"""In place of a token whose logits were NaN or infinite."""


def mark_broken(logits: Tensor, tokens: Tensor) -> Tensor:
    """tokens int64 [S] with BROKEN where the logit of the token is not finite.

    One NaN makes a whole row of hidden states NaN, and sampling treats NaN and infinity as the
    largest logit, so checking the sampled token's logit is enough.
    """
    taken = logits.gather(1, tokens[:, None])[:, 0]
    # isfinite takes twice as many kernels; comparisons with NaN are false.
    return torch.where(taken.abs() < torch.inf, tokens, BROKEN)


class NumericsWatch:
    """Finds the first module of a step with a non-finite output. Synchronises after every module.

    first: its name and class; None, also to begin anew, where all were finite. It says whether the
    input was non-finite already: then the cause is another rank, or code between modules.
    """

    def __init__(self, model: nn.Module):
        self.first: str | None = None
        for name, module in model.named_modules():
            watch = _Watched(self, f"{name or 'the model'} ({type(module).__name__})")
            module.register_forward_pre_hook(watch.before)
            module.register_forward_hook(watch.after)
            if isinstance(module, RMSNorm):  # with a residual it is not called as a module
                module.add = watch.around(module.add)  # type: ignore[method-assign]


class _Watched:
    """Hooks of one module, on its inputs (which it may overwrite) and its output."""

    def __init__(self, watch: NumericsWatch, name: str):
        self._watch, self._name = watch, name
        self._was_broken = False

    def before(self, module: nn.Module | None, inputs: Iterable[Any]) -> None:
        if self._watch.first is None:
            self._was_broken = any(map(_is_broken, inputs))

    def after(self, module: nn.Module | None, inputs: Any, output: Any) -> None:
        if self._watch.first is None and _is_broken(output):
            given = ", whose input was not finite already" if self._was_broken else ""
            self._watch.first = f"{self._name}{given}"

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: Any) -> Any:
            self.before(None, given)
            output = function(*given)
            self.after(None, given, output)
            return output

        return call


def _is_broken(x: Any) -> bool:
    if isinstance(x, QuantizedInput):
        return _is_broken(x.q) or _is_broken(x.scales)
    values = x.total() if isinstance(x, UnaddedRows) else own_part(x)
    if not isinstance(values, Tensor) or not values.is_floating_point():
        return False
    return not bool(values.float().isfinite().all())  # no device has isfinite for float8
