"""Times the gated delta-net of a Qwen3.5-35B-A3B layer on prompts, and other ways to launch it.

    python benchmarks/kernels/bench_delta_rule.py [--prompts COUNTxTOKENS ...]

Requests of few tokens are those of a step that verifies drafts: all but the first are draft tokens.

Medians of CUDA-graph replays over several layers' inputs, so that caches are cold: microseconds of
a layer. `error`: of the outputs, beside those of the launch that the engine uses.
"""

import argparse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import triton
from gpu_timing import replay_microseconds
from torch import Tensor

from vllm.kernels.triton import delta_rule
from vllm.kernels.triton.delta_rule_kernels import BY_TOKEN

KEY_HEADS, HEADS, SIZE, TAPS = 16, 32, 128, 4
CHANNELS = (2 * KEY_HEADS + HEADS) * SIZE
PROMPTS = ((1, 2), (8, 2), (64, 2), (1, 3500), (4, 1000), (64, 32), (1, 500))
NUM_LAYERS = 4
VARIANTS: list[tuple[str, dict[str, Any]]] = [
    *[
        ("chunk_kernel", {"num_stages": stages, "num_warps": warps, "BLOCK_V": block})
        for stages, warps, block in ((1, 4, 32), (2, 4, 32), (3, 4, 32), (3, 8, 32), (2, 4, 16),
                                     (3, 4, 16), (2, 4, 64), (3, 8, 64), (1, 4, 64))
    ],
    *[
        ("solve_kernel", {"num_warps": warps, "maxnreg": registers})
        for warps, registers in ((4, 128), (4, 168), (4, 255), (8, 128), (8, 255))
    ],
]  # fmt: skip


class Launched:
    """A kernel with other options than it is launched with."""

    def __init__(self, kernel: Any, options: dict[str, Any]):
        self._kernel, self._options = kernel, options

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Any]:
        if "BLOCK_V" in self._options:
            grid = (triton.cdiv(SIZE, self._options["BLOCK_V"]), *grid[1:])
        kernel = self._kernel[grid]
        return lambda *args, **options: kernel(*args, **(options | self._options))


@contextmanager
def replaced(name: str, options: dict[str, Any]) -> Iterator[None]:
    kernel = getattr(delta_rule, name)
    setattr(delta_rule, name, Launched(kernel, options))
    try:
        yield
    finally:
        setattr(delta_rule, name, kernel)


def layer_inputs(count: int, tokens: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Arguments of the convolution and of the recurrence."""
    numbers = partial(torch.randn, device="cuda")
    starts = tokens * torch.arange(count + 1, device="cuda", dtype=torch.int32)
    requests = {
        "state_slots": torch.arange(1, count + 1, device="cuda", dtype=torch.int32),
        "query_start_loc": starts,
        "seq_lens": starts.diff(),
        "max_query_len": tokens,
    }
    num_slots = count + 1
    if tokens <= BY_TOKEN.value:
        num_slots = count * tokens + 1
        drafts = torch.arange(count + 1, num_slots, device="cuda", dtype=torch.int32)
        slots = torch.full((count, tokens), -1, device="cuda", dtype=torch.int32)
        slots[:, 1:] = drafts.view(count, -1)
        requests |= {"seq_lens": starts.diff() + 1000, "draft_slots": slots.flatten()}
    x = numbers(count * tokens, CHANNELS, dtype=torch.bfloat16)
    key_size = KEY_HEADS * SIZE
    q, k, v = x.split((key_size, key_size, HEADS * SIZE), 1)
    b, a = numbers(count * tokens, 2 * HEADS, dtype=torch.bfloat16).chunk(2, 1)
    conv = {
        "x": x,
        "weight": numbers(TAPS, CHANNELS),
        "state": numbers(num_slots, TAPS - 1, CHANNELS, dtype=torch.bfloat16),
        **requests,
    }
    rule = {
        "query": q.unflatten(1, (KEY_HEADS, SIZE)),
        "key": k.unflatten(1, (KEY_HEADS, SIZE)),
        "value": v.unflatten(1, (HEADS, SIZE)),
        "a": a,
        "b": b,
        "decay_rate": torch.rand(HEADS, device="cuda"),
        "dt_bias": numbers(HEADS),
        "state": numbers(num_slots, HEADS, SIZE, SIZE),
        **requests,
    }
    return conv, rule


def time_prompts(count: int, tokens: int) -> None:
    layers = [layer_inputs(count, tokens) for _ in range(NUM_LAYERS)]
    rules = [partial(delta_rule.gated_delta_rule, **rule) for _, rule in layers]
    convs = [partial(delta_rule.causal_conv1d, **conv) for conv, _ in layers]
    print(f"{count} x {tokens}: convolution {replay_microseconds(convs):.1f} us, ", end="")
    print(f"recurrence {replay_microseconds(rules):.1f} us", flush=True)
    if tokens <= BY_TOKEN.value:
        return
    wanted = rules[0]().float()
    for name, options in VARIANTS:
        with replaced(name, options):
            try:
                us = replay_microseconds(rules)
                error = float((rules[0]().float() - wanted).norm() / wanted.norm())
                print(f"    {name} {options}: {us:.1f} us, error {error:.1e}", flush=True)
            except triton.runtime.errors.OutOfResources as reason:
                print(f"    {name} {options}: {reason}", flush=True)


def prompts_of(text: str) -> tuple[int, int]:
    count, tokens = map(int, text.split("x"))
    return count, tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompts", type=prompts_of, nargs="+", default=PROMPTS)
    for count, tokens in parser.parse_args().prompts:
        time_prompts(count, tokens)


if __name__ == "__main__":
    main()
