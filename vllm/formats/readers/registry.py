"""The readers of `quantization_config`, by its `quant_method`.

A reader is a QuantizationConfig in a file of this folder and a name in the list below, or one that
an installed package offers as an entry point of the group `vllm.quantization_readers`.
"""

import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from vllm.errors import CheckpointError, ConfigError, did_you_mean
from vllm.formats.readers.awq import AwqConfig
from vllm.formats.readers.base import QuantizationConfig
from vllm.formats.readers.compressed_tensors import CompressedTensorsConfig
from vllm.formats.readers.fp8 import Fp8Config
from vllm.formats.readers.gptq import GptqConfig
from vllm.formats.readers.modelopt import (
    MIXED,
    ModelOptConfig,
    ModelOptMixedConfig,
    ModelOptNvFp4Config,
)
from vllm.formats.readers.mxfp4 import Mxfp4Config
from vllm.formats.readers.quark import QuarkConfig
from vllm.utils.entry_points import extensions

ENTRY_POINTS = "vllm.quantization_readers"
_BUILTIN = (Fp8Config, ModelOptConfig, ModelOptNvFp4Config, ModelOptMixedConfig,
            CompressedTensorsConfig, AwqConfig, GptqConfig, Mxfp4Config, QuarkConfig)  # fmt: skip

# What upstream calls a method with one of its kernels; here the selector chooses the kernel.
_UPSTREAM_NAMES = {
    "awq_marlin": "awq", "gptq_marlin": "gptq", "gpt_oss_mxfp4": "mxfp4",
    "deepseek_v4_fp8": "fp8", "compressed_tensors": "compressed-tensors",
}  # fmt: skip

# quant_methods that are refused with what to take instead.
_REFUSED = {
    "bitsandbytes": "bitsandbytes quantises while loading, and what it stores is for its own "
    "kernels; take the model as it was before and quantise it with `vllm quantize MODEL OUT "
    "--format int8` (for load_in_8bit) or `--format w4a16` or `nvfp4` (for load_in_4bit)",
}


@cache
def quantization_methods() -> dict[str, type[QuantizationConfig]]:
    """By `quant_method`."""
    return {reader.name: reader for reader in (*_BUILTIN, *extensions(ENTRY_POINTS).values())}


def find_quantization(
    configs: Sequence[Any], folder: Path, asked: str | None, model: str
) -> QuantizationConfig | None:
    """What the checkpoint in `folder` says, or what `--quantization` asks for; None for neither.

    configs: config.json and its text_config, as transformers reads them.
    """
    found = (getattr(config, "quantization_config", None) for config in configs)
    stored = next((entry for entry in found if entry is not None), None)
    fields = stored if isinstance(stored, dict | None) else stored.to_dict()
    if may_be_beside(fields):
        fields = modelopt_file(folder) or fields
    return resolve_quantization(fields, asked, model)


def may_be_beside(stored: dict[str, Any] | None) -> bool:
    """Whether a ModelOpt checkpoint may say beside config.json what it does not say there: all of
    it, or of which layers it quantises how."""
    lacks_layers = stored and stored.get("quant_algo") == MIXED
    return not stored or bool(lacks_layers and not stored.get("quantized_layers"))


def modelopt_file(folder: Path) -> dict[str, Any] | None:
    """What older ModelOpt checkpoints say beside a config.json that says nothing."""
    file = folder / "hf_quant_config.json"
    if not file.is_file():
        return None
    try:
        content = json.loads(file.read_text())
        return {**content, "quant_method": "modelopt"}
    except (ValueError, TypeError, OSError) as error:
        raise CheckpointError(f"{file} is not a JSON object: {error}") from error


def resolve_quantization(
    stored: dict[str, Any] | None, asked: str | None, model: str
) -> QuantizationConfig | None:
    """`stored`: quantization_config of config.json. ConfigError, CheckpointError."""
    methods = quantization_methods()
    asked = _UPSTREAM_NAMES.get(asked or "", asked)
    if asked is not None and asked not in methods:
        raise ConfigError(
            f"--quantization {asked!r} is unknown: it takes {', '.join(methods)}"
            f"{did_you_mean(asked, methods)}"
        )
    if stored is None:
        return methods[asked].at_load() if asked else None
    name = stored.get("quant_method")
    if not isinstance(name, str) or name not in methods:
        instead = _REFUSED.get(str(name))
        raise CheckpointError(
            f"{model}: quant_method {name!r} is not supported; "
            + (instead or f"it takes {', '.join(methods)}, or a checkpoint that is not quantised")
        )
    if asked is not None and not issubclass(methods[asked], methods[name]):
        raise ConfigError(
            f"--quantization {asked} contradicts the checkpoint, which is quantised as {name}; "
            f"leave the flag out"
        )
    return methods[asked or name].from_checkpoint(stored)
