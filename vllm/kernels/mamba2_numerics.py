"""Whether the recurrence of Mamba2 computes what it should, as `delta_numerics` compares one."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import softplus

from vllm.kernels.delta_numerics import Recurrence, comparison
from vllm.kernels.select.problem import Mamba2Problem


def mamba2_comparison(
    problem: Mamba2Problem, backend: str, device: torch.device
) -> Callable[[], float]:
    """What makes the kernel, calls it, and returns the largest relative error."""
    heads, groups = problem.num_heads, problem.num_groups
    sizes = heads * problem.head_dim, *(groups * problem.state_size,) * 2

    def views(channels: Tensor, dt: Tensor) -> tuple[Tensor, ...]:
        x, b, c = channels.split(sizes, 1)
        b, c = (one.unflatten(1, (groups, problem.state_size)) for one in (b, c))
        return x.unflatten(1, (heads, problem.head_dim)), dt, b, c

    given = Recurrence(
        (sum(sizes), heads),
        views,
        lambda normal: (0.2 * normal(heads).abs(), normal(heads), normal(heads)),
        (heads, problem.state_size, problem.head_dim),
        partial(recurrence, limits=problem.dt_limits),
    )
    return comparison(given, problem, backend, device)


def recurrence(
    x: Tensor,
    dt: Tensor,
    b: Tensor,
    c: Tensor,
    decay_rate: Tensor,
    dt_bias: Tensor,
    skip: Tensor,
    state: Tensor,
    limits: tuple[float, float] = (0.0, float("inf")),
) -> tuple[Tensor, Tensor]:
    """Outputs [T, heads, head_dim] and state [heads, state_size, head_dim] of one request, token by
    token, by the formulas of `mamba2_scan` in vllm.ops."""
    group = x.shape[1] // b.shape[1]
    steps = softplus(dt + dt_bias).clamp(*limits)
    wide_b, wide_c = (one.repeat_interleave(group, 1) for one in (b, c))
    outputs = []
    for values, step, own_b, own_c in zip(x, steps, wide_b, wide_c):
        state = torch.exp(-decay_rate * step)[:, None, None] * state
        state = state + own_b[:, :, None] * (step[:, None] * values)[:, None]
        outputs.append(torch.einsum("hn,hnp->hp", own_c, state) + skip[:, None] * values)
    return torch.stack(outputs), state
