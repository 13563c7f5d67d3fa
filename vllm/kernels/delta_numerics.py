"""Whether a recurrence computes what it should, the gated delta rule first: outputs, and the states
that it leaves.

Requests of a few steps start, go on, or decode, with NaN behind the inputs and in the slots of
states that nothing may read. The reference is the recurrence in float64, token by token.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import softplus

from vllm.kernels import registry
from vllm.kernels.numerics import WrongResultError, checked_error, max_error, poison_memory
from vllm.kernels.select.problem import DeltaRuleProblem, Mamba2Problem
from vllm.utils.torch_utils import dtype_of

# Requests of each step, (tokens now, tokens before): kernels for prompts with decodes, for decodes
# and for a prompt alone may be different ones. Some are longer than two chunks of 64 tokens.
_STEPS = (((1, 0), (7, 3), (70, 0), (1, 9), (66, 5)), ((1, 0), (1, 5), (1, 3)), ((129, 0),))
_EPS = 1e-6
_NUM_POISONED_ROWS = 64
_POISONED = "behind the inputs and in slots of no request"

_Kernel = Callable[..., Tensor]
"""`gated_delta_rule`, or another recurrence, of an ops module (vllm.ops)."""
Normal = Callable[..., Tensor]
"""Random numbers of a shape."""


@dataclass(frozen=True, slots=True)
class Recurrence:
    """How a recurrence is called, and its definition.

    projections: columns of what projections give for each token. views: of these, in the problem's
    type, the kernel's arguments with a token in each row. of_heads: its arguments after them.
    state: shape of a request's. definition: of float64 arguments of one request and its state, the
    outputs and the state after them.
    """

    projections: tuple[int, ...]
    views: Callable[..., tuple[Tensor, ...]]
    of_heads: Callable[[Normal], tuple[Tensor, ...]]
    state: tuple[int, int, int]
    definition: Callable[..., tuple[Tensor, Tensor]]


def delta_rule_comparison(
    problem: DeltaRuleProblem, backend: str, device: torch.device
) -> Callable[[], float]:
    """As of `comparison`."""
    keys, values = problem.num_key_heads, problem.num_value_heads
    key_size = keys * problem.key_dim
    sizes = key_size, key_size, values * problem.value_dim

    def views(qkv: Tensor, ba: Tensor) -> tuple[Tensor, ...]:
        q, k, v = qkv.split(sizes, 1)
        b, a = ba.chunk(2, 1)
        q, k = (x.unflatten(1, (keys, problem.key_dim)) for x in (q, k))
        return q, k, v.unflatten(1, (values, problem.value_dim)), a, b

    given = Recurrence(
        (sum(sizes), 2 * values),
        views,
        lambda normal: (normal(values).abs(), normal(values)),
        (values, problem.key_dim, problem.value_dim),
        recurrence,
    )
    return comparison(given, problem, backend, device)


def comparison(
    given: Recurrence,
    problem: DeltaRuleProblem | Mamba2Problem,
    backend: str,
    device: torch.device,
) -> Callable[[], float]:
    """What makes the kernel, calls it, and returns the largest relative error of a request's
    outputs or state; WrongResultError where that is too large. The reference is computed before."""
    steps = [_Step(given, problem, requests, device) for requests in _STEPS]

    def run() -> float:
        kernel: _Kernel = getattr(registry.backend(backend), problem.family)(problem)
        return max(step.error(kernel) for step in steps)

    return run


@dataclass(frozen=True, slots=True)
class _Expected:
    """Of one request: float32 outputs, and the state after them."""

    name: str
    slot: int
    outputs: Tensor
    state: Tensor


class _Step:
    """Random requests, whose slots are shuffled, with their reference."""

    def __init__(
        self,
        given: Recurrence,
        problem: DeltaRuleProblem | Mamba2Problem,
        requests: Sequence[tuple[int, int]],
        device: torch.device,
    ):
        self._problem, self._definition = problem, given.definition
        generator = torch.Generator(device).manual_seed(0)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, device=device)

        def int32(values: list[int]) -> Tensor:
            return torch.tensor(values, dtype=torch.int32, device=device)

        lengths = [now for now, _ in requests]
        self._lengths, self._num_tokens = lengths, sum(lengths)
        dtype = dtype_of(problem.dtype)
        # As projections give them: views of one tensor.
        self._tokens = given.views(
            *(self._poisoned(normal(self._num_tokens, n).to(dtype)) for n in given.projections)
        )
        self._of_heads = given.of_heads(normal)
        slots = (1 + torch.randperm(len(requests) + 1, generator=generator, device=device)).tolist()
        self._slots = slots[: len(requests)]
        shape = len(requests) + 2, *given.state
        self._states = torch.full(shape, float("nan"), device=device)
        for slot, (_, before) in zip(self._slots, requests):
            if before:
                self._states[slot] = normal(*shape[1:])
        starts = [0, *torch.tensor(lengths).cumsum(0).tolist()]
        lens = [now + before for now, before in requests]
        self._requests = int32(self._slots), int32(starts), int32(lens)
        self._expected = list(self._references(requests))

    @staticmethod
    def _poisoned(x: Tensor) -> Tensor:
        behind = x.new_full((_NUM_POISONED_ROWS, x.shape[1]), float("nan"))
        return torch.cat([x, behind])[: len(x)]

    def _references(self, requests: Sequence[tuple[int, int]]) -> Iterator[_Expected]:
        of_heads = [x.double() for x in self._of_heads]
        starts = self._requests[1].tolist()
        for r, (slot, (now, before)) in enumerate(zip(self._slots, requests)):
            own = (x[starts[r] : starts[r + 1]].double() for x in self._tokens)
            state = self._states[slot] if before else torch.zeros_like(self._states[slot])
            outputs, state = self._definition(*own, *of_heads, state.double())
            name = f"{now} tokens after {before}"
            yield _Expected(name, slot, outputs.float(), state.float())

    def error(self, kernel: _Kernel) -> float:
        limit = max_error(self._problem)
        states = self._states.clone()
        poison_memory(self._tokens[0], self._num_tokens * states[0].numel())
        out = kernel(*self._tokens, *self._of_heads, states, *self._requests).float()
        if len(out) != self._num_tokens:
            raise WrongResultError(f"the result for {self._num_tokens} tokens has {len(out)} rows")
        errors = []
        for own, one in zip(out.split(self._lengths), self._expected):
            errors.append(checked_error(own, one.outputs, limit, one.name, _POISONED))
            what = f"the state of {one.name}"
            errors.append(checked_error(states[one.slot], one.state, limit, what, _POISONED))
            states[one.slot] = self._states[one.slot]
        if not torch.equal(states.view(torch.int32), self._states.view(torch.int32)):
            raise WrongResultError("a state was written to the slot of no request")
        return max(errors)


def recurrence(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    a: Tensor,
    b: Tensor,
    decay_rate: Tensor,
    dt_bias: Tensor,
    state: Tensor,
) -> tuple[Tensor, Tensor]:
    """Outputs [T, value heads, value_dim] and state [value heads, key_dim, value_dim] of one
    request, by the formulas of `cpu_ops.gated_delta_rule`."""
    group = value.shape[1] // query.shape[1]

    def unit(x: Tensor) -> Tensor:
        return (x / (x.square().sum(-1, keepdim=True) + _EPS).sqrt()).repeat_interleave(group, 1)

    queries, keys = unit(query) * query.shape[2] ** -0.5, unit(key)
    decays = torch.exp(-decay_rate * softplus(a + dt_bias))[..., None, None]
    betas = torch.sigmoid(b)[..., None]
    outputs = []
    for q, k, v, decay, beta in zip(queries, keys, value, decays, betas):
        state = decay * state
        delta = beta * (v - torch.einsum("hk,hkv->hv", k, state))
        state = state + k[:, :, None] * delta[:, None]
        outputs.append(torch.einsum("hk,hkv->hv", q, state))
    return torch.stack(outputs), state
