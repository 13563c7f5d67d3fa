"""Bytes that a decode step must move, by layer: weights as they are stored, cache and states.

All that asks how many bytes a layer has or reads counts here. Weights of norms, convolutions and
rows of the embedding are not counted: together they are below a thousandth of a step.
"""

from collections import Counter
from collections.abc import Iterable
from math import prod

from vllm.architectures.decoder import CHUNKED, DeltaRule, Item, Mamba2Scan
from vllm.architectures.kv_cache import MLA
from vllm.architectures.sharding import LinearSpec
from vllm.formats.weight_format import WeightFormat
from vllm.kernels.select.problem import (
    AttentionProblem,
    DeltaRuleProblem,
    KVQuantProblem,
    LinearProblem,
    Mamba2Problem,
    MoEProblem,
    Problem,
    WeightProblem,
)
from vllm.utils.dataclasses import dataclass

_TENSOR_BYTES = {"float32": 4, "int32": 4, "bfloat16": 2, "float16": 2}  # 1 for all others
_BIAS_BYTES = 4  # biases are kept in float32
ITEM_SIZES = {"fp32": 4, "bf16": 2, "fp16": 2, "fp8": 1}
"""Bytes of a number, of activations and caches."""


@dataclass(frozen=True)
class DecodeStep:
    """batch: requests, each with one new token. context: keys that each sees, its own included, the
    mean of the batch."""

    batch: int
    context: float


@dataclass(frozen=True)
class LayerBytes:
    """What a step reads and writes. weights: with scales and biases; of experts those that tokens
    choose where the router spreads them evenly. cache: keys and values read, and those of the new
    tokens written. states: recurrent ones, read and written. activations: inputs and outputs."""

    weights: float = 0.0
    cache: float = 0.0
    states: float = 0.0
    activations: float = 0.0

    @property
    def required(self) -> float:
        """What comes from memory. Activations of a decode step do not: they are small enough to
        stay in the last cache from one kernel to the next."""
        return self.weights + self.cache + self.states

    def __add__(self, other: "LayerBytes") -> "LayerBytes":
        return LayerBytes(
            self.weights + other.weights,
            self.cache + other.cache,
            self.states + other.states,
            self.activations + other.activations,
        )


@dataclass(frozen=True)
class LayerKind:
    """Layers that are alike. name: of the part within its decoder layer, and in brackets what tells
    it from others of that name. problems: what it asks kernels for, as texts. layers: their full
    names. bytes: of all of them together."""

    name: str
    problems: tuple[str, ...]
    layers: tuple[str, ...]
    bytes: LayerBytes


# ---------------------------------------------------------------- a layer


def weight_bytes(problem: WeightProblem) -> int:
    """Of all that a rank stores of the layer: codes, scales and biases. Optional tensors, such as
    zero points and scales of inputs, are not counted: the format does not say who has them."""
    if isinstance(problem, LinearProblem):
        parts = problem.parts or (problem.n,)
        return stored_bytes(problem.weight, parts, problem.k, problem.bias)
    num_local = -(-problem.num_experts // problem.cut_experts)
    return num_local * _bytes_of_expert(problem)


def stored_bytes(weight: WeightFormat, rows: tuple[int, ...], columns: int, bias: bool) -> int:
    """Of a weight of `columns`, merged of parts with so many rows."""
    shapes = weight.shapes(rows, columns)
    stored = (t for t in weight.description.tensors if not t.is_optional)
    of_tensors = sum(_TENSOR_BYTES.get(t.dtype, 1) * prod(shapes[t.name]) for t in stored)
    return of_tensors + _BIAS_BYTES * sum(rows) * bias


def _bytes_of_expert(problem: MoEProblem) -> int:
    inner, hidden = problem.intermediate, problem.hidden
    first = (inner,) * problem.num_first_parts
    return stored_bytes(problem.weight, first, hidden, problem.bias) + stored_bytes(
        problem.weight, (hidden,), inner, problem.bias
    )


def key_bytes(problem: AttentionProblem | KVQuantProblem) -> int:
    """Of one token in the cache of one layer: its key and its value, or its latent."""
    row = problem.num_kv_heads * problem.head_dim * ITEM_SIZES[problem.format]
    return row if problem.variant.startswith(MLA) else 2 * row


def keys_seen(problem: AttentionProblem, context: float) -> float:
    """Of one request that has `context` keys."""
    window = problem.sliding_window
    if not window:
        return context
    if problem.variant == CHUNKED:
        return (context - 1) % window + 1
    return min(context, float(window))


def experts_read(problem: MoEProblem, batch: int) -> float:
    """How many of a rank's experts `batch` tokens choose, where each is as likely as another."""
    num_local = -(-problem.num_experts // problem.cut_experts)
    return num_local * (1.0 - (1.0 - problem.top_k / problem.num_experts) ** batch)


def layer_bytes(problem: Problem, step: DecodeStep) -> LayerBytes:
    """Of one layer on one rank; of recurrences without their states, which `state_bytes` has."""
    batch = step.batch
    size = batch * ITEM_SIZES[problem.dtype]
    if isinstance(problem, LinearProblem):
        return LayerBytes(weight_bytes(problem), activations=size * (problem.n + problem.k))
    if isinstance(problem, MoEProblem):
        weights = experts_read(problem, batch) * _bytes_of_expert(problem)
        return LayerBytes(weights, activations=size * 2 * problem.hidden)
    if isinstance(problem, AttentionProblem):
        read = batch * keys_seen(problem, step.context) * key_bytes(problem)
        columns = problem.head_dim + (problem.value_dim or problem.head_dim)
        return LayerBytes(cache=read, activations=size * problem.num_heads * columns)
    if isinstance(problem, KVQuantProblem):
        return LayerBytes(cache=batch * key_bytes(problem))
    return LayerBytes(activations=size * _recurrent_columns(problem))


def _recurrent_columns(problem: DeltaRuleProblem | Mamba2Problem) -> int:
    """Of queries, keys, values and results of one token."""
    if isinstance(problem, DeltaRuleProblem):
        values = problem.num_value_heads * problem.value_dim
        return 2 * (problem.num_key_heads * problem.key_dim + values)
    of_groups = problem.num_groups * problem.state_size
    return 2 * (problem.num_heads * problem.head_dim + of_groups)


def _bytes_besides(item: Item, step: DecodeStep, tp: int, dtype: str) -> LayerBytes:
    """What the problems of a layer do not say: its recurrent states, and the weight of a projection
    that attention over latents absorbs, which is kept in the type of activations."""
    size = ITEM_SIZES[dtype]
    if isinstance(item, DeltaRule | Mamba2Scan):
        return LayerBytes(states=2 * step.batch * item.states.request_bytes(size, tp))
    if isinstance(item, LinearSpec) and item.is_absorbed:
        shapes = [region.shape for _, region in item.shards("", 0, tp)]
        return LayerBytes(size * sum(rows * columns for rows, columns in shapes))
    return LayerBytes()


# ---------------------------------------------------------------- a model


def layer_kinds(
    problems: Iterable[tuple[str, Problem]],
    items: Iterable[tuple[str, Item]],
    step: DecodeStep,
    tp: int,
    dtype: str,
) -> list[LayerKind]:
    """Of all layers of a rank, in the order of the model.

    problems: what each asks for, by its name, as `layer_problems` lists them or an engine recorded
    them. items: (prefix of its name, item) of the same model. dtype: of activations, as `bf16`.
    """
    asked: dict[str, list[Problem]] = {}
    besides: dict[str, LayerBytes] = {}
    for prefix, item in items:
        besides[prefix + item.name] = _bytes_besides(item, step, tp, dtype)
        if isinstance(item, LinearSpec) and item.is_absorbed:
            asked[prefix + item.name] = []
    for name, problem in problems:
        asked.setdefault(name, []).append(problem)
    groups: dict[tuple[str, tuple[Problem, ...]], list[str]] = {}
    found: dict[tuple[str, tuple[Problem, ...]], LayerBytes] = {}
    for name, own in asked.items():
        key = part_name(name), tuple(own)
        groups.setdefault(key, []).append(name)
        sizes = besides.get(name, LayerBytes())
        for problem in own:
            sizes += layer_bytes(problem, step)
        found[key] = found.get(key, LayerBytes()) + sizes
    alike = Counter(name for name, _ in groups)
    return [
        LayerKind(
            name if alike[name] == 1 else f"{name} ({_difference(own)})",
            tuple(map(str, own)),
            tuple(layers),
            found[name, own],
        )
        for (name, own), layers in groups.items()
    ]


def _difference(problems: tuple[Problem, ...]) -> str:
    """What tells layers of one name apart."""
    first = problems[0] if problems else None
    if isinstance(first, AttentionProblem):
        heads = f"{first.num_heads}/{first.num_kv_heads}x{first.head_dim}"
        return f"window {first.sliding_window}, {heads}" if first.sliding_window else heads
    if isinstance(first, LinearProblem):
        return f"{first.weight}:{first.n}x{first.k}"
    return "; ".join(map(str, problems))


def part_name(layer: str) -> str:
    """`self_attn.qkv_proj` of `model.layers.3.self_attn.qkv_proj`."""
    parts = layer.split(".")
    numbers = [i for i, part in enumerate(parts) if part.isdecimal()]
    return ".".join(parts[numbers[0] + 1 :]) if numbers else layer


def total(kinds: Iterable[LayerKind]) -> LayerBytes:
    found = LayerBytes()
    for kind in kinds:
        found += kind.bytes
    return found
