"""Calls every chosen kernel once, alone, to attribute and quarantine one that fails or is wrong.

A faulting kernel makes the GPU unusable for its process, and the fault surfaces at a later call. So
each call is synchronised here, before the model runs as a whole.
"""

from collections.abc import Callable, Iterator
from datetime import date
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from vllm.distributed.all2all import NaiveAll2All
from vllm.distributed.groups import PeerError, wait_for
from vllm.errors import ConfigError, KernelFailedError, VllmError, is_of_machine
from vllm.kernels import registry
from vllm.kernels.evidence.passed import add_passed, read_passed
from vllm.kernels.evidence.quarantine import LIFT, Failure, add_failure, path_of_file
from vllm.kernels.evidence.versions import version_of
from vllm.kernels.jit.ready import NVCC, running
from vllm.kernels.numerics import WrongResultError
from vllm.kernels.select.decision import Decision, Record
from vllm.kernels.select.reason import Why
from vllm.kernels.select.spec import COMPILERS
from vllm.kernels.selection import Selection
from vllm.logger import get_logger
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.embedding import LMHead
from vllm.model_executor.layers.fused_moe.layer import FusedMoE
from vllm.model_executor.layers.linear import Linear
from vllm.model_executor.layers.recurrent import RecurrentLayer
from vllm.utils.torch_utils import dtype_of
from vllm.worker.kernel_probes import Probe, probes_of
from vllm.worker.prompt_logprobs import MOST_PROMPT_ROWS
from vllm.worker.step_inputs import StepInputs

logger = get_logger(__name__)

# Timeout of one call. The largest takes hundreds of milliseconds.
HANG_SECONDS = 60.0


class FirstCalls:
    """Calls the kernels of `model`, with zeros and with numbers whose result is known, and collects
    failures. hang_seconds: timeout of a call."""

    def __init__(self, model: nn.Module, selection: Selection, hang_seconds: float = HANG_SECONDS):
        self._model, self._selection = model, selection
        self._device = torch.device(selection.device.kind)
        self._hang_seconds = hang_seconds
        self._failures: list[tuple[str, Failure]] = []
        self._num_lost = 0  # failures that could not be written to the quarantine file

    def of_weights(self, max_tokens: int, max_seqs: int, num_engines: int = 1) -> None:
        """Linear layers and experts, one layer per decision: with one token, the maximum, and at
        the boundaries of each split range. Kernels that compile at their first call: with every
        size that compiles separately. max_tokens: of a step of one of `num_engines` data-parallel
        ranks in lock-step."""
        self._settle()
        for layer in self._of_each_choice(Linear, FusedMoE):
            most = max_tokens
            if isinstance(layer, LMHead):
                most = min(max_tokens, max(max_seqs, MOST_PROMPT_ROWS))
            elif isinstance(layer, FusedMoE):
                # The tokens of all ranks together, or one row per chosen expert.
                most *= num_engines
                if isinstance(layer.all2all, NaiveAll2All):
                    most *= layer.problem.top_k
            compiles = isinstance(layer, FusedMoE) or _compilers(layer.decision) - {NVCC}
            for count in token_counts(most) if compiles else _ends(layer.decision, most):
                call = partial(_multiply, layer, count)
                if not self._call(layer.prefix, layer.decision, count, call):
                    break
        self._raise()

    def of_results(self, block_size: int) -> None:
        """Compares each kernel with the reference before its first use on this machine. block_size:
        tokens of a page of the KV cache."""
        passed = set(read_passed())
        probes = probes_of(self._records(), self._selection, block_size)
        new = [probe for probe in probes if probe.name not in passed]
        if not new:
            return
        self._settle()
        add_passed([probe.name for probe in new if self._is_right(probe)])
        self._raise()

    def _is_right(self, probe: Probe) -> bool:
        """False, too, where there is no reference to compare with: the kernel then serves, and the
        next start tries again."""
        try:
            call = probe.prepared()
            self._wait()
        except Exception as error:  # no memory for it, or a mistake of ours
            backend = probe.candidate.backend
            logger.warning("%s serves without a comparison with the reference: %s", backend, error)
            return False
        return self._try(call, partial(self._accuse, probe))

    def _records(self) -> list[Record]:
        found = []
        for layer in self._model.modules():
            if isinstance(layer, (Linear, FusedMoE, Attention)):
                found.append((layer.prefix, layer.decision))
            if isinstance(layer, Attention):
                found.append((layer.prefix, layer.writing))
            if isinstance(layer, RecurrentLayer):
                found.append((layer.recurrence_name, layer.decision))
        return found

    def of_attention(self, inputs: StepInputs, sizes: list[tuple[int, int, int]]) -> None:
        """Attention, one layer per decision, with a KV cache. sizes: tokens, requests and longest
        request of each call. Skips host-planned kernels, which take no padding of prompts."""
        self._settle()
        for layer in self._of_each_choice(Attention):
            for decision, num_tokens, call in _attention_calls(layer, inputs, sizes):
                if not self._call(layer.prefix, decision, num_tokens, call):
                    break
        self._raise()

    def _settle(self) -> None:
        """Synchronises, so that earlier work is not blamed on the first kernel. VllmError where it
        failed."""
        try:
            self._wait()
        except Exception as error:
            if is_of_machine(error):
                raise
            text = " ".join(str(error).split())[:300]
            raise VllmError(
                f"what ran before kernels were tried failed: {text}. That may be a kernel which "
                f"DeepGEMM compiled; VLLM_USE_DEEP_GEMM=0 serves without"
            ) from error

    def _of_each_choice(self, *kinds: type[nn.Module]) -> Iterator[Any]:
        seen = set()
        layers: list[Any] = [m for m in self._model.modules() if isinstance(m, kinds)]
        for layer in layers:
            decision: Decision = layer.decision
            key = decision.problem, decision.chosen
            if key not in seen and not decision.is_emulated:
                seen.add(key)
                yield layer

    def _call(
        self, layer: str, decision: Decision, num_tokens: int, call: Callable[[], object]
    ) -> bool:
        """Whether the call succeeded; see `_try`."""

        def accuse(why: Why, reason: str) -> None:
            text = f"at its first call, with {num_tokens} tokens: {reason}"
            backend, size_key = running(decision, num_tokens), decision.problem.size_key
            self._enter(layer, decision, backend, size_key, why, text)

        return self._try(call, accuse)

    def _accuse(self, probe: Probe, why: Why, reason: str) -> None:
        """For every layer that the kernel was chosen for; of those of one size once."""
        text = f"when compared with the reference: {reason}"
        by_size = {size_key: layer for layer, size_key in reversed(probe.layers.items())}
        for size_key, layer in by_size.items():
            self._enter(layer, probe.decision, probe.candidate.backend, size_key, why, text)

    def _try(self, call: Callable[[], object], accuse: Callable[[Why, str], None]) -> bool:
        """Whether the call succeeded; otherwise adds a failure by `accuse`. Raises errors that no
        kernel caused, and all failures where the GPU is unusable."""
        try:
            call()
            self._wait()
            return True
        except PeerError:
            accuse(Why.LIBRARY, f"did not end within {self._hang_seconds:g} s")
            self._raise()
        except VllmError:
            raise
        except WrongResultError as error:
            accuse(Why.NUMERICS, str(error))
        except Exception as error:
            if is_of_machine(error):
                raise
            text = " ".join(str(error).split())[:300]
            accuse(Why.LIBRARY, f"{type(error).__name__}: {text}")
        try:
            self._wait()
        except Exception:
            self._raise()
        return False

    def _wait(self) -> None:
        if self._device.type == "cuda":
            event = torch.cuda.Event()
            event.record()
            wait_for(event, self._hang_seconds)

    def _enter(
        self, layer: str, decision: Decision, backend: str, size_key: str, why: Why, reason: str
    ) -> None:
        selection = self._selection
        spec = registry.spec_of(decision, backend)
        assert spec is not None
        failure = Failure(
            backend=backend,
            version=version_of(spec, selection.libs, selection.device),
            device=str(selection.device),
            size_key=size_key,
            why=why,
            reason=reason,
            date=date.today().isoformat(),
        )
        self._failures.append((layer, failure))
        try:
            add_failure(failure)
        except ConfigError as error:
            logger.warning("%s", error)
            self._num_lost += 1

    def _raise(self) -> None:
        if not self._failures:
            return
        found = "\n".join(
            f"kernel {f.backend} failed for {layer} ({f.size_key}) {f.reason}"
            for layer, f in self._failures
        )
        if self._num_lost:
            raise VllmError(
                f"{found}\n{path_of_file()} cannot be written, so another start would choose the "
                f"same: set VLLM_CACHE_ROOT to a folder that can be, or ask for another kernel"
            )
        raise KernelFailedError(
            f"{found}\nIt is in quarantine from now on ({LIFT} lifts that): start again, and "
            f"another one is chosen"
        )


def token_counts(most: int) -> list[int]:
    """Powers of two and their midpoints up to `most`: compiled kernels round grid and buffer sizes
    up to powers of two."""
    powers = [1 << exponent for exponent in range((most - 1).bit_length())]
    return sorted({most, *powers, *(min(most, power + power // 2) for power in powers)})


def _ends(decision: Decision, most: int) -> list[int]:
    limits = [limit for limit, _ in decision.parts if limit is not None]
    return sorted({1, most, *(n for limit in limits for n in (limit, limit + 1) if n <= most)})


def _compilers(decision: Decision) -> set[str]:
    specs = registry.winning_specs(decision)
    used = {name for spec in specs for name in (spec.compiles, *(lib for lib, _ in spec.libs))}
    return used & set(COMPILERS)


def _zeros(layer: Linear | FusedMoE, *shape: int) -> Tensor:
    dtype, kind = dtype_of(layer.problem.dtype), layer.decision.device.kind
    return torch.zeros(shape, dtype=dtype, device=kind)


def _multiply(layer: Linear | FusedMoE, num_tokens: int) -> None:
    """Tokens are routed to experts round-robin."""
    if isinstance(layer, Linear):
        layer.multiply(_zeros(layer, num_tokens, layer.problem.k))
        return
    problem, kernel = layer.problem, layer.kernel
    assert kernel is not None
    x = _zeros(layer, num_tokens, problem.hidden)
    own = problem.num_experts // problem.cut_experts
    # Ranks that all2all rows hand over each of a token's experts by itself.
    top_k = 1 if isinstance(layer.all2all, NaiveAll2All) else problem.top_k
    ids = (torch.arange(num_tokens * top_k, device=x.device) % own).view(num_tokens, top_k)
    kernel(x, torch.ones_like(ids, dtype=torch.float32), ids)


def _attention_calls(
    layer: Attention, inputs: StepInputs, sizes: list[tuple[int, int, int]]
) -> Iterator[tuple[Decision, int, Callable[[], object]]]:
    """Calls of the KV cache writer, unless it is fused into the rotary kernel, and of attention."""
    if layer.kernel.planner is not None:
        return
    for num_tokens, num_seqs, longest in sizes:
        batch = inputs.padding(num_tokens, num_seqs, longest)
        q, *kv = layer.kernel.zeros(num_tokens, batch.positions.device)
        write: Callable[..., object] = layer.kernel.write  # of K and V, or of latents
        yield layer.writing, num_tokens, partial(write, *kv, batch.groups[layer.group])
        yield layer.decision, num_tokens, partial(layer, q, *kv, batch)
