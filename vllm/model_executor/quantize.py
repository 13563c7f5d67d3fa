"""Writes a quantised copy of a checkpoint, file by file, in the layout that Hugging Face uses."""

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor
from tqdm import tqdm

from vllm.config import ModelConfig, VllmConfig
from vllm.errors import CheckpointError, ConfigError, did_you_mean
from vllm.kernels.select.policy import Policy
from vllm.kernels.selection import Selection
from vllm.machine import Device, Lib, Libs
from vllm.model_executor.checkpoint_formats import FORMATS
from vllm.model_executor.layers.fused_moe.layer import FusedMoE
from vllm.model_executor.layers.linear import Linear
from vllm.model_executor.model_loader import model_context
from vllm.model_executor.model_loader.checkpoint import INDEX_NAME, Checkpoint
from vllm.model_executor.models.decoder import CausalLM


def quantize_checkpoint(source: Path, target: Path, format_name: str) -> None:
    """Quantises the linear layers and experts of the model in `source`, its output projection
    excepted.

    `target` must not exist; it appears only when it is complete. Raises ConfigError or
    CheckpointError.
    """
    if format_name not in FORMATS:
        raise ConfigError(
            f"--format {format_name!r} is unknown: it takes {', '.join(FORMATS)}"
            f"{did_you_mean(format_name, FORMATS)}"
        )
    if target.exists():
        raise ConfigError(f"{target} exists already: give a new folder, or remove it first")
    checkpoint = Checkpoint(source)
    wanted = _quantised_weights(source, checkpoint)
    chosen = FORMATS[format_name](_num_columns(checkpoint, wanted))
    with new_folder(target) as folder:
        _copy_other_files(source, folder)
        _write_config(source, folder, chosen.with_ignored(_kept_weights(checkpoint, wanted)))
        _write_weights(checkpoint, folder, wanted, chosen.quantise)


@contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """A folder to fill; it takes its name `target` only if the block ends without an error."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    except OSError as error:
        raise ConfigError(f"cannot write to {target.parent}: {error}") from error
    try:
        yield folder
        folder.chmod(0o755)
        os.rename(folder, target)
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"cannot write {target}: {error}") from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _quantised_weights(source: Path, checkpoint: Checkpoint) -> set[str]:
    """Checkpoint names of the weights to quantise, as our model of this architecture has them."""
    as_is = VllmConfig(model_config=ModelConfig.load(str(source), max_model_len=1))
    if as_is.quant_config is not None:
        raise CheckpointError(f"{source} is quantised already; quantise the original instead")
    model_config = ModelConfig.load(str(source), quantization="fp8", max_model_len=1)
    config = VllmConfig(model_config=model_config)
    selection = Selection(Device("cpu"), Libs.of([Lib("torch")]), Policy())
    with torch.device("meta"):
        model = CausalLM(model_context(config, selection, checkpoint))
    ours = {
        f"{name}.weight"
        for layer in model.modules()
        if isinstance(layer, Linear | FusedMoE) and layer.method.format.is_quantized
        for name in layer.shard_names
    }
    slot_name = model_config.architecture.slot_name
    return {name for name in checkpoint.infos if slot_name(name) in ours}


def _kept_weights(checkpoint: Checkpoint, wanted: set[str]) -> list[str]:
    """Names, without `.weight`, of the other matrices but embeddings: other readers of the
    checkpoint may take each of them for a linear layer."""
    names = (
        name.removesuffix(".weight")
        for name, info in checkpoint.infos.items()
        if name.endswith(".weight") and len(info.shape) == 2 and name not in wanted
    )
    return sorted(name for name in names if not name.endswith("embed_tokens"))


def _num_columns(checkpoint: Checkpoint, weights: set[str]) -> dict[str, int]:
    for name in weights:
        shape = checkpoint.infos[name].shape
        if len(shape) != 2:
            raise CheckpointError(
                f"{checkpoint.infos[name].file.name}: {name} has shape {list(shape)}, but a linear "
                f"weight has rows and columns"
            )
    return {name: checkpoint.infos[name].shape[1] for name in sorted(weights)}


def _copy_other_files(source: Path, folder: Path) -> None:
    for file in source.iterdir():
        is_weight = file.suffix in (".safetensors", ".bin", ".pt", ".pth", ".gguf")
        if file.is_file() and not is_weight and file.name not in ("config.json", INDEX_NAME):
            shutil.copyfile(file, folder / file.name)


def _write_config(source: Path, folder: Path, quantization_config: dict[str, Any]) -> None:
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"] = quantization_config
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def _write_weights(
    checkpoint: Checkpoint,
    folder: Path,
    wanted: set[str],
    quantise: Callable[[str, Tensor], dict[str, Tensor]],
) -> None:
    weight_map: dict[str, str] = {}
    pending: dict[str, Tensor] = {}
    files = {name: info.file.name for name, info in checkpoint.infos.items()}
    total_bytes = 0
    last = {file: name for name, file in files.items()}
    for name, tensor in tqdm(checkpoint.tensors(), "Quantising", len(files), unit="tensor"):
        tensor = tensor.contiguous()  # a part of a transposed stack is not
        try:
            pieces = quantise(name, tensor) if name in wanted else {name: tensor.clone()}
        except ValueError as error:
            raise CheckpointError(f"{files[name]}: {name}: {error}") from error
        pending.update(pieces)
        total_bytes += sum(piece.nbytes for piece in pieces.values())
        weight_map.update(dict.fromkeys(pieces, files[name]))
        if last[files[name]] == name:
            save_file(pending, folder / files[name], metadata={"format": "pt"})
            pending = {}
    if len(last) > 1:
        index = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
        (folder / INDEX_NAME).write_text(json.dumps(index, indent=2) + "\n")
