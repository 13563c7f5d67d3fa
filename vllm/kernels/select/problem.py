"""Problems: what a layer asks a kernel to compute, complete and printable."""

from functools import cached_property, lru_cache
from itertools import groupby
from typing import ClassVar, NamedTuple

from vllm.architectures.decoder import RELU2, SOFTCAP, SWIGLUOAI
from vllm.architectures.kv_cache import MLA
from vllm.formats.act_scheme import ActScheme
from vllm.formats.partial_blocks import Axis, Fit, linear_fit, moe_fit
from vllm.formats.weight_format import WeightFormat
from vllm.utils.dataclasses import dataclass

_MOST_LISTED = 8  # parts of a layer that are named one by one


def comes_quantised(name: str) -> bool:
    """Whether norms or activation functions are before layer `name`, not attention."""
    return not name.endswith(("attn.o_proj", "attn.out_proj"))


@dataclass(frozen=True, compiled=True)
class LinearProblem:
    """y[M, n] = x[M, k] @ W[n, k].T (+ bias), sizes per rank.

    act: the activation schemes the checkpoint allows, in order of preference. dtype: of x and y.
    m_range: token counts to expect. parts: rows of the weights merged into this one (QKV,
    gate-up), () for a single weight. cut_n, cut_k: in how many ranks' shards the rows and the
    columns were cut. requant_error: relative Frobenius error that scales of another form (UE8M0 of
    blocks, else the type of the activations) would cause to this weight; None where it is not
    known, 0 where they are exact. comes_quantised: whether what is before the layer can quantise x
    in the pass that it makes anyway, see `comes_quantised`.
    """

    family: ClassVar[str] = "linear"

    n: int
    k: int
    weight: WeightFormat
    act: tuple[ActScheme, ...] = (ActScheme.NONE,)
    dtype: str = "bf16"
    bias: bool = False
    m_range: tuple[int, int] = (1, 8192)
    parts: tuple[int, ...] = ()
    cut_n: int = 1
    cut_k: int = 1
    requant_error: float | None = None
    comes_quantised: bool = True

    @property
    def format(self) -> str:
        return self.weight.kind

    @property
    def sizes(self) -> tuple[int, int]:
        """That kernels want to be multiples, as `Fit.sizes`."""
        return self.n, self.k

    def block_fit(self, takes_any_block: bool) -> Fit | None:
        """How a kernel of fixed or of any blocks takes partial ones; None where there are none."""
        weight, parts = self.weight, self.parts or (self.n,)
        if weight.scale != "block":
            return None
        num_rows, num_columns = weight.block
        if not self.k % num_columns and not [size for size in parts if size % num_rows]:
            return None
        rows, columns = Axis(parts, self.cut_n), Axis((self.k,), self.cut_k)
        return linear_fit(rows, columns, weight.block, takes_any_block)

    @cached_property
    def size_key(self) -> str:
        """What a measurement is filed under, with the activation schemes that may be taken:
        `fp8-block[128x128]:4096x12288 bf16 dynamic-group128,none`; with partial scale blocks also
        what a kernel then computes with: `..., padded to 256x2048, refined to 64x128 blocks`."""
        weight, others = _texts(self.weight, self.dtype, self.act)
        return f"{weight}:{self.n}x{self.k} {others}{_fits_text(self)}"

    def __str__(self) -> str:
        merged = f"({_parts_text(self.parts)})" if len(self.parts) > 1 else ""
        return f"linear {self.weight}:{self.n}{merged}x{self.k} {self.dtype}" + " bias" * self.bias


def _parts_text(parts: tuple[int, ...]) -> str:
    """4096+1024+1024; of many parts, how often each comes: 32x128+32x256."""
    if len(parts) <= _MOST_LISTED:
        return "+".join(map(str, parts))
    return "+".join(f"{len([*run])}x{size}" for size, run in groupby(parts))


@dataclass(frozen=True)
class MoEProblem:
    """A fused mixture of experts, per rank: down(silu(gate x) * up x) for each token and each of
    its `top_k` experts, with gate-up [2 * intermediate, hidden] and down [hidden, intermediate];
    without a gate down(activation(up x)), with up [intermediate, hidden].

    num_experts: all; cut_experts: expert-parallel ranks; cut: tensor-parallel ranks that share an
    expert's `intermediate` columns. layout: how activations arrive, `standard` (tokens by router)
    or `batched` (a padded block per expert, as low-latency all-to-all delivers them). activation:
    of the gate, `silu` or `swigluoai` with its swiglu_limit, or of up without a gate RELU2
    (vllm.architectures.decoder); other texts say what an expert computes instead. bias: both
    products have one.
    """

    family: ClassVar[str] = "moe"
    m_range: ClassVar[tuple[int, int]] = (1, 8192)

    num_experts: int
    top_k: int
    hidden: int
    intermediate: int
    weight: WeightFormat
    act: tuple[ActScheme, ...] = (ActScheme.NONE,)
    dtype: str = "bf16"
    layout: str = "standard"
    cut: int = 1
    cut_experts: int = 1
    requant_error: float | None = None
    activation: str = "silu"
    swiglu_limit: float = 0.0
    bias: bool = False

    @property
    def format(self) -> str:
        return self.weight.kind

    @property
    def sizes(self) -> tuple[int, int]:
        """As of a LinearProblem."""
        return self.intermediate, self.hidden

    def block_fit(self, takes_any_block: bool) -> Fit | None:
        """As of a LinearProblem."""
        if self.weight.scale != "block":
            return None
        num_experts = -(-self.num_experts // self.cut_experts)
        inner = Axis((self.intermediate,), self.cut)
        return moe_fit(inner, self.hidden, num_experts, self.weight.block, takes_any_block)

    @property
    def num_first_parts(self) -> int:
        """Weights of an expert's first product: gate and up, or up alone."""
        return 1 if self.activation == RELU2 else 2

    @cached_property
    def size_key(self) -> str:
        """What a measurement is filed under: experts, intermediate, hidden and top_k, the rest as
        of a LinearProblem. Of experts over 4 ranks `128/4x768x2048x8`: tokens choose among 128, and
        32 are here. Of experts that ranks cut it is that of whole ones of the same size."""
        ranks = f"/{self.cut_experts}" if self.cut_experts > 1 else ""
        sizes = f"{self.num_experts}{ranks}x{self.intermediate}x{self.hidden}x{self.top_k}"
        weight, others = _texts(self.weight, self.dtype, self.act)
        return f"{weight}:{sizes} {others}{self._other_activation}{_fits_text(self)}"

    @property
    def comes_quantised(self) -> bool:
        """Whether what is before can quantise tokens: those that ranks share come as floats."""
        return self.cut == self.cut_experts == 1

    @property
    def computed_activation(self) -> str:
        """With its limit where it is the other function than has one."""
        has_limit = self.activation == SWIGLUOAI
        is_usual = has_limit == (self.swiglu_limit > 0)
        return self.activation + ("" if is_usual else f" with a limit of {self.swiglu_limit:g}")

    @property
    def _other_activation(self) -> str:
        """`, swigluoai with biases`; "" for silu without."""
        biases = " with biases" * self.bias
        activation = self.computed_activation
        return "" if activation == "silu" and not biases else f", {activation}{biases}"

    def __str__(self) -> str:
        sizes = f"{self.num_experts}x({self.intermediate}x{self.hidden}) top {self.top_k}"
        batched = " batched" if self.layout == "batched" else ""
        return f"moe {self.weight}:{sizes} {self.dtype}{batched}{self._other_activation}"


@lru_cache(maxsize=256)
def _texts(weight: WeightFormat, dtype: str, act: tuple[ActScheme, ...]) -> tuple[str, str]:
    return str(weight), f"{dtype} {','.join(act)}"


def _fits_text(problem: "WeightProblem") -> str:
    """How kernels take partial scale blocks; "" where there are none."""
    padded = problem.block_fit(False)
    refined = problem.block_fit(True) if padded is not None else None
    if padded is None or refined is None:
        return ""
    sizes, block = ("x".join(map(str, pair)) for pair in (padded.sizes, refined.block))
    return f", padded to {sizes}, refined to {block} blocks"


class _CacheProblem:
    """What problems of a KV cache or of recurrent states share."""

    __slots__ = ()

    act: ClassVar[tuple[ActScheme, ...]] = (ActScheme.NONE,)
    m_range: ClassVar[tuple[int, int]] = (1, 8192)
    sizes: ClassVar[tuple[int, int]] = (0, 0)
    comes_quantised: ClassVar[bool] = False

    def block_fit(self, takes_any_block: bool) -> None:
        """A cache has no scale blocks."""

    @property
    def size_key(self) -> str:
        """What a failure or a measurement is filed under."""
        return str(self)

    @property
    def variants(self) -> frozenset[str]:
        """What a kernel has to compute besides what all of its family do."""
        variant: str = getattr(self, "variant", "")
        return frozenset({variant} if variant else ())


@dataclass(frozen=True)
class AttentionProblem(_CacheProblem):
    """Causal attention over a paged KV cache; `format` is the element type of the cache.

    variant: what is computed besides or instead (`MLA`, `sinks`), "" for plain attention; of
    `chunks` sliding_window is their size.
    value_dim: of a value, the first columns of a key (`MLA`); 0 for values of their own of
    head_dim. scale: of scores before the softmax, None for head_dim ** -0.5. softcap: scaled scores
    become softcap * tanh(score / softcap), 0 for none; the variant says so too.
    """

    family: ClassVar[str] = "attention"

    num_heads: int
    num_kv_heads: int
    head_dim: int
    format: str
    dtype: str = "bf16"
    sliding_window: int = 0
    variant: str = ""
    value_dim: int = 0
    scale: float | None = None
    softcap: float = 0.0

    @property
    def variants(self) -> frozenset[str]:
        """Kernels of latents (`MLA`) compute nothing else: with more it is a variant of its own."""
        found = [self.variant] if self.variant else []
        if self.softcap and self.variant != SOFTCAP:
            found.append(SOFTCAP)
        if self.variant == MLA:
            found += ["a sliding window"] if self.sliding_window else []
            return frozenset({" with ".join(found)})
        if self.value_dim:
            found.append(f"values of {self.value_dim}")
        return frozenset(found)

    @property
    def softmax_scale(self) -> float:
        return self.head_dim**-0.5 if self.scale is None else self.scale

    def __str__(self) -> str:
        heads = f"{self.num_heads}/{self.num_kv_heads} heads of {self.head_dim}"
        heads += f" with values of {self.value_dim}" if self.value_dim else ""
        window = f" window={self.sliding_window}" if self.sliding_window else ""
        variant = _variant_text(", ".join(sorted(self.variants)))
        return f"attention {heads} {self.dtype}, {self.format} cache{window}{variant}"


@dataclass(frozen=True)
class KVQuantProblem(_CacheProblem):
    """Writing K and V of new tokens to a paged cache of element type `format`.

    variant: of the attention, where its cache holds something else (`MLA`: latents).
    """

    family: ClassVar[str] = "kv_quant"

    num_kv_heads: int
    head_dim: int
    format: str
    dtype: str = "bf16"
    variant: str = ""

    def __str__(self) -> str:
        heads = f"{self.num_kv_heads} heads of {self.head_dim}"
        return f"kv_quant {heads} {self.dtype} -> {self.format}{_variant_text(self.variant)}"


def _variant_text(variant: str) -> str:
    return f", {variant}" if variant else ""


@dataclass(frozen=True)
class DeltaRuleProblem(_CacheProblem):
    """The gated delta rule over a recurrent state of each request, sizes per rank; `format` is the
    element type of the states."""

    family: ClassVar[str] = "delta_rule"
    format: ClassVar[str] = "fp32"

    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    dtype: str = "bf16"

    def __str__(self) -> str:
        keys = f"{self.num_key_heads} key heads of {self.key_dim}"
        values = f"{self.num_value_heads} value heads of {self.value_dim}"
        return f"delta_rule {keys}, {values} {self.dtype}"


@dataclass(frozen=True)
class Mamba2Problem(_CacheProblem):
    """The recurrence of Mamba2 over a state of each request, sizes per rank; `format` is the
    element type of the states.

    num_groups: of heads that share B and C of state_size. dt_min, dt_max: bounds of the steps, None
    for no upper one.
    """

    family: ClassVar[str] = "mamba2"
    format: ClassVar[str] = "fp32"

    num_heads: int
    num_groups: int
    head_dim: int
    state_size: int
    dtype: str = "bf16"
    dt_min: float = 0.0
    dt_max: float | None = None

    @property
    def dt_limits(self) -> tuple[float, float]:
        return self.dt_min, float("inf") if self.dt_max is None else self.dt_max

    def __str__(self) -> str:
        least, most = self.dt_limits
        limits = f", steps of {least:g} to {most:g}" if (least, most) != (0, float("inf")) else ""
        heads = f"{self.num_heads} heads of {self.head_dim}"
        return f"mamba2 {heads}, {self.num_groups} groups of {self.state_size} {self.dtype}{limits}"


WeightProblem = LinearProblem | MoEProblem
Measurable = WeightProblem | AttentionProblem
"""What tables hold times of."""
Problem = Measurable | KVQuantProblem | DeltaRuleProblem | Mamba2Problem


class Traits(NamedTuple):
    """What a kernel is judged by besides the sizes of a problem: few problems of a model differ in
    it. scale, block: of the weight's format. variants: of attention; the rest as of the problems.
    """

    family: str
    format: str
    dtype: str
    act: tuple[ActScheme, ...]
    most_tokens: int
    scale: str = ""
    block: tuple[int, int] = (0, 0)
    bias: bool = False
    layout: str = ""
    activation: str = ""
    variants: frozenset[str] = frozenset()


def traits_of(problem: Problem) -> Traits:
    found = problem.family, problem.format, problem.dtype, problem.act, problem.m_range[1]
    if isinstance(problem, LinearProblem):
        return Traits(*found, problem.weight.scale, problem.weight.block, problem.bias)
    if isinstance(problem, MoEProblem):
        of_weight = problem.weight.scale, problem.weight.block
        activation = problem.computed_activation
        return Traits(*found, *of_weight, problem.bias, problem.layout, activation)
    return Traits(*found, variants=problem.variants)
