"""The first call of every chosen kernel, alone: one that fails is known by name and quarantined.

A kernel that faults leaves the GPU unusable for its process, and is told of at whatever asks the
GPU for something next. So each is waited for here, before the model runs as a whole.
"""

from collections.abc import Callable, Iterator
from datetime import date
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from vllm.distributed.expert_exchange import AllToAll
from vllm.distributed.groups import PeerError, wait_for
from vllm.errors import KernelFailedError, VllmError, is_of_machine
from vllm.kernels import registry
from vllm.kernels.jit.ready import NVCC, running
from vllm.kernels.selection import Selection
from vllm.kernels.spec import COMPILERS, Decision, Why
from vllm.kernels.tune_quarantine import LIFT, Failure, add_failure
from vllm.kernels.versions import version_of
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.embedding import LMHead
from vllm.model_executor.layers.fused_moe.layer import FusedMoE
from vllm.model_executor.layers.linear import Linear
from vllm.utils.torch_utils import dtype_of
from vllm.worker.step_inputs import StepInputs

# Of one call on the GPU. The largest takes hundreds of milliseconds.
_HANG_SECONDS = 60.0


class FirstCalls:
    """Calls kernels of `model` with zeros; collects those that fail."""

    def __init__(self, model: nn.Module, selection: Selection):
        self._model, self._selection = model, selection
        self._device = torch.device(selection.device.kind)
        self._failures: list[tuple[str, Failure]] = []

    def of_weights(self, max_tokens: int, max_seqs: int, num_engines: int = 1) -> None:
        """Linear layers and experts, one layer for each choice, with one token and as many as may
        come, and around the ends of each range of a split; where kernels compile at a first call,
        with all that compile apart. max_tokens: of a step of one of `num_engines` in lock step."""
        for layer in self._of_each_choice(Linear, FusedMoE):
            most = max_tokens
            if isinstance(layer, LMHead):
                most = min(max_tokens, max_seqs)
            elif isinstance(layer, FusedMoE):
                # They get the tokens of all engines together, or a row for each of theirs.
                most *= num_engines
                if isinstance(layer.exchange, AllToAll):
                    most *= layer.problem.top_k
            compiles = isinstance(layer, FusedMoE) or _compilers(layer.decision) - {NVCC}
            for count in token_counts(most) if compiles else _ends(layer.decision, most):
                if not self._call(layer, count, partial(_multiply, layer, count)):
                    break
        self._raise()

    def of_attention(self, inputs: StepInputs, sizes: list[tuple[int, int, int]]) -> None:
        """One layer for each choice; they have a cache. sizes: tokens, requests and longest request
        of each call."""
        for layer in self._of_each_choice(Attention):
            for size in sizes:
                if not self._call(layer, size[0], partial(_attend, layer, inputs, *size)):
                    break
        self._raise()

    def _of_each_choice(self, *kinds: type[nn.Module]) -> Iterator[Any]:
        seen = set()
        layers: list[Any] = [m for m in self._model.modules() if isinstance(m, kinds)]
        for layer in layers:
            decision: Decision = layer.decision
            key = decision.problem, decision.chosen
            if key not in seen and not decision.is_emulated:
                seen.add(key)
                yield layer

    def _call(self, layer: Any, num_tokens: int, call: Callable[[], object]) -> bool:
        """Whether it came to an end; if not, why is among the failures. Raises what is no kernel's
        doing, and all failures where the GPU is lost."""
        try:
            call()
            self._wait()
            return True
        except PeerError:
            self._enter(layer, num_tokens, f"did not end within {_HANG_SECONDS:g} s")
            self._raise()
        except VllmError:
            raise
        except Exception as error:
            if is_of_machine(error):
                raise
            text = " ".join(str(error).split())[:300]
            self._enter(layer, num_tokens, f"{type(error).__name__}: {text}")
        try:
            self._wait()
        except Exception:
            self._raise()
        return False

    def _wait(self) -> None:
        if self._device.type == "cuda":
            event = torch.cuda.Event()
            event.record()
            wait_for(event, _HANG_SECONDS)

    def _enter(self, layer: Any, num_tokens: int, reason: str) -> None:
        decision, selection = layer.decision, self._selection
        backend = running(decision, num_tokens)
        spec = registry.spec_of(decision, backend)
        assert spec is not None
        failure = Failure(
            backend=backend,
            version=version_of(spec, selection.libs, selection.device),
            device=str(selection.device),
            size_key=decision.problem.size_key,
            why=Why.LIBRARY,
            reason=f"at its first call, with {num_tokens} tokens: {reason}",
            date=date.today().isoformat(),
        )
        add_failure(failure)
        self._failures.append((layer.prefix, failure))

    def _raise(self) -> None:
        if not self._failures:
            return
        found = "\n".join(
            f"kernel {f.backend} failed for {layer} ({f.size_key}) {f.reason}"
            for layer, f in self._failures
        )
        raise KernelFailedError(
            f"{found}\nIt is in quarantine from now on ({LIFT} lifts that): start again, and "
            f"another one is chosen"
        )


def token_counts(most: int) -> list[int]:
    """Powers of two, and what is halfway between them, up to `most`: sizes of grids and buffers
    are rounded up to powers of two by kernels that are compiled for them."""
    counts = {most}
    power = 1
    while power < most:
        counts |= {power, min(most, power + power // 2)}
        power *= 2
    return sorted(counts)


def _ends(decision: Decision, most: int) -> list[int]:
    limits = [limit for limit, _ in decision.winner.parts if limit is not None]
    return sorted({1, most, *(n for limit in limits for n in (limit, limit + 1) if n <= most)})


def _compilers(decision: Decision) -> set[str]:
    specs = registry.winning_specs(decision)
    used = {name for spec in specs for name in (spec.compiles, *(lib for lib, _ in spec.libs))}
    return used & set(COMPILERS)


def _zeros(layer: Linear | FusedMoE, *shape: int) -> Tensor:
    dtype, kind = dtype_of(layer.problem.dtype), layer.decision.device.kind
    return torch.zeros(shape, dtype=dtype, device=kind)


def _multiply(layer: Linear | FusedMoE, num_tokens: int) -> None:
    """Tokens go to experts in turn."""
    if isinstance(layer, Linear):
        layer.multiply(_zeros(layer, num_tokens, layer.problem.k))
        return
    problem, kernel = layer.problem, layer.kernel
    assert kernel is not None
    x = _zeros(layer, num_tokens, problem.hidden)
    own = problem.num_experts // problem.cut_experts
    # Ranks that exchange rows hand over each of a token's experts by itself.
    top_k = 1 if isinstance(layer.exchange, AllToAll) else problem.top_k
    ids = (torch.arange(num_tokens * top_k, device=x.device) % own).view(num_tokens, top_k)
    kernel(x, torch.ones_like(ids, dtype=torch.float32), ids)


def _attend(layer: Attention, inputs: StepInputs, num_tokens: int, *size: int) -> None:
    problem, batch = layer.kernel.problem, inputs.padding(num_tokens, *size)
    dtype, device = dtype_of(problem.dtype), batch.positions.device
    q, k, v = (
        torch.zeros(num_tokens, heads, problem.head_dim, dtype=dtype, device=device)
        for heads in (problem.num_heads, problem.num_kv_heads, problem.num_kv_heads)
    )
    layer(q, k, v, batch)
