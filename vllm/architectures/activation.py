"""Names of activation functions: those of config.json, and ours."""

from vllm.architectures.fields import Fields
from vllm.errors import CheckpointError, did_you_mean

ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
}
"""Of gated MLPs. gelu_tanh: the approximation by tanh, under whatever name."""


def activation(fields: Fields) -> str:
    """A value of ACTIVATIONS. CheckpointError for a name that is not among them."""
    name = "hidden_act" if fields.get("hidden_activation") is None else "hidden_activation"
    given = fields.get(name) or "silu"
    if not isinstance(given, str) or given not in ACTIVATIONS:
        raise CheckpointError(
            f"{fields.source}: {name} = {given!r} is not supported: it takes "
            f"{', '.join(ACTIVATIONS)}{did_you_mean(str(given), ACTIVATIONS)}"
        )
    return ACTIVATIONS[given]
