"""How the router of a mixture of experts chooses among them."""

from collections.abc import Callable
from typing import Any, Literal

from vllm.architectures.fields import Fields
from vllm.errors import CheckpointError
from vllm.utils.dataclasses import dataclass


@dataclass(frozen=True)
class Router:
    """Scores are softmax or sigmoid of the logits; chosen are the top_k best of score + correction
    bias out of the topk_groups best of num_groups equal groups. The weights of a token's experts
    are their scores, divided by their sum (renormalise), times routed_scale. scales_inputs: they
    multiply what an expert reads, not what it gives (one expert a token).
    ValueError for what has no meaning; `checked` makes it the CheckpointError of a config.
    """

    num_experts: int
    top_k: int
    renormalise: bool
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    has_correction_bias: bool = False
    num_groups: int = 1
    topk_groups: int = 1
    routed_scale: float = 1.0
    scales_inputs: bool = False

    def __post_init__(self) -> None:
        if self.top_k > self.num_experts:
            raise ValueError(
                f"num_experts_per_tok = {self.top_k} is more than num_experts = {self.num_experts}"
            )
        if self.num_experts % self.num_groups or not 1 <= self.topk_groups <= self.num_groups:
            raise ValueError(
                f"topk_group = {self.topk_groups} of n_group = {self.num_groups} "
                f"groups of {self.num_experts} experts; accepted: an n_group that divides the "
                f"experts, and from 1 to n_group of them"
            )
        kept = self.num_experts // self.num_groups * self.topk_groups
        if self.top_k > kept:
            raise ValueError(
                f"num_experts_per_tok = {self.top_k}, but topk_group = "
                f"{self.topk_groups} of n_group = {self.num_groups} groups leave {kept} of "
                f"{self.num_experts} experts to choose from; accepted: up to {kept}, or a larger "
                f"topk_group"
            )

    def arguments(self) -> dict[str, Any]:
        """Of the `route` ops, besides logits and bias."""
        names = ("top_k", "renormalise", "scoring", "num_groups", "topk_groups", "routed_scale")
        return {name: getattr(self, name) for name in names}


def checked(fields: Fields, make: Callable[[], Router]) -> Router:
    """The router that `make` gives; CheckpointError, with the config's path, for one that has no
    meaning."""
    try:
        return make()
    except ValueError as error:
        raise CheckpointError(f"{fields.source}: {error}") from error


def sigmoid_router(
    fields: Fields, num_experts: int, top_k: int, renormalises: bool = True
) -> Router:
    """Of DeepSeek V3 and its like. renormalises: where config.json does not say norm_topk_prob."""
    return Router(
        num_experts,
        top_k,
        renormalise=fields.flag("norm_topk_prob", renormalises),
        scoring="sigmoid",
        has_correction_bias=True,
        num_groups=fields.optional("n_group", 1),
        topk_groups=fields.optional("topk_group", 1),
        routed_scale=fields.number("routed_scaling_factor", 1.0),
    )
