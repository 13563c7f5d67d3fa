"""Qwen3.5 dense: gated delta-net layers, and every few of them one of gated full attention."""

from typing import Any, ClassVar

from torch import Tensor, nn

from vllm.errors import CheckpointError, did_you_mean
from vllm.kernels.activations import Activation
from vllm.logger import get_logger
from vllm.model_executor.context import ForwardBatch, ModelContext
from vllm.model_executor.layers.delta_net import GatedDeltaNet
from vllm.model_executor.layers.layernorm import RMSNorm, ZeroCentredRMSNorm
from vllm.model_executor.layers.rotary_embedding import RotaryEmbedding
from vllm.model_executor.models.llama import LlamaForCausalLM
from vllm.model_executor.models.qwen3 import Qwen3Attention

logger = get_logger(__name__)

_LAYER_TYPES = ("linear_attention", "full_attention")
# Vision, and the layers of multi-token prediction.
_NOT_SERVED = ("visual.", "mtp.")


class Qwen3_5Attention(Qwen3Attention):
    """Qwen3's, of which each head's output is multiplied by the sigmoid of a gate of its own."""

    heads_per_query = 2
    head_norm: ClassVar[type[RMSNorm]] = ZeroCentredRMSNorm

    @staticmethod
    def sliding_window(config: Any, layer: int) -> int:
        return 0

    def forward(self, x: Activation, batch: ForwardBatch) -> Tensor:
        heads = self.qkv_proj(x).view(x.shape[0], -1, self.head_dim)
        counts = (2 * self.num_heads, self.num_kv_heads, self.num_kv_heads)
        queries_and_gates, k, v = heads.split(counts, dim=1)
        q, gate = queries_and_gates[:, 0::2], queries_and_gates[:, 1::2]
        q, k = self.shape_qk(q, k, batch.positions, self.attn.target(v, batch))
        y = self.attn(q, k, v, batch)
        self.ops.mul_sigmoid(y.unflatten(1, gate.shape[1:]), gate)
        return y


class Qwen3_5ForCausalLM(LlamaForCausalLM):
    attention = Qwen3_5Attention
    norm = ZeroCentredRMSNorm

    def __init__(self, ctx: ModelContext):
        _check_config(ctx.hf_config)
        super().__init__(ctx)

    @classmethod
    def mixer(
        cls, ctx: ModelContext, prefix: str, layer: int, rotary: RotaryEmbedding
    ) -> nn.Module:
        if ctx.hf_config.layer_types[layer] == "linear_attention":
            return GatedDeltaNet(ctx, f"{prefix}.linear_attn")
        return super().mixer(ctx, prefix, layer, rotary)

    @staticmethod
    def slot_name(name: str) -> str | None:
        """Text models are stored alone or as part of a multimodal one."""
        if name.removeprefix("model.").startswith(_NOT_SERVED):
            return None
        stored = "model.language_model."
        return "model." + name.removeprefix(stored) if name.startswith(stored) else name


class Qwen3_5ForConditionalGeneration(Qwen3_5ForCausalLM):
    def __init__(self, ctx: ModelContext):
        super().__init__(ctx)
        log_what_is_skipped()


def log_what_is_skipped() -> None:
    logger.info(
        "Qwen3.5: serving the text model; images are not supported, and weights for vision and for "
        "multi-token prediction are skipped"
    )


def _check_config(config: Any) -> None:
    """CheckpointError for what this implementation would compute wrongly."""
    if len(config.layer_types) != config.num_hidden_layers:
        raise CheckpointError(
            f"config.json: layer_types has {len(config.layer_types)} entries, but "
            f"num_hidden_layers = {config.num_hidden_layers}"
        )
    for layer, kind in enumerate(config.layer_types):
        if kind not in _LAYER_TYPES:
            raise CheckpointError(
                f"config.json: layer_types[{layer}] = {kind!r}: it takes {', '.join(_LAYER_TYPES)}"
                f"{did_you_mean(kind, _LAYER_TYPES)}"
            )
    key_heads, value_heads = config.linear_num_key_heads, config.linear_num_value_heads
    if value_heads % key_heads:
        raise CheckpointError(
            f"config.json: linear_num_value_heads = {value_heads} is not a multiple of "
            f"linear_num_key_heads = {key_heads}"
        )
    if getattr(config, "attn_output_gate", True) is not True:
        raise CheckpointError(
            f"config.json: attn_output_gate = {config.attn_output_gate!r} is not supported: it "
            f"takes true"
        )
