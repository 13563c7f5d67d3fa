"""Writes a quantised copy of a checkpoint, file by file, in the layout that Hugging Face uses."""

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
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
from vllm.model_executor.checkpoint_formats import FORMATS, quantise_head, with_int8_head
from vllm.model_executor.layers.fused_moe.layer import FusedMoE
from vllm.model_executor.layers.linear import Linear
from vllm.model_executor.model_loader import model_context
from vllm.model_executor.model_loader.checkpoint import INDEX_NAME, Checkpoint
from vllm.model_executor.models.decoder import CausalLM

Quantise = Callable[[str, Tensor], dict[str, Tensor]]
"""(name, weight) -> what takes its place."""


def quantize_checkpoint(
    source: Path, target: Path, format_name: str, has_int8_head: bool = False
) -> None:
    """Quantises the linear layers and experts of the model in `source`, and with `has_int8_head`
    its output projection, to int8. One that is tied to the embedding gets a weight of its own;
    the embedding stays as it is.

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
    changes: dict[str, Any] = {}
    heads: dict[str, Quantise] = {}
    if has_int8_head:
        chosen = with_int8_head(chosen)
        head, is_tied = _head_weight(source, checkpoint)
        heads[head] = partial(_with_head, is_tied)
        changes = {"tie_word_embeddings": False}
    quantisers = dict.fromkeys(wanted, chosen.quantise) | heads
    with new_folder(target) as folder:
        _copy_other_files(source, folder)
        kept = _kept_weights(checkpoint, quantisers)
        _write_config(source, folder, changes, chosen.with_ignored(kept))
        _write_weights(checkpoint, folder, quantisers)


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


def _head_weight(source: Path, checkpoint: Checkpoint) -> tuple[str, bool]:
    """Checkpoint name of what the output projection multiplies by, and whether that is the
    embedding."""
    slot_name = ModelConfig.load(str(source), max_model_len=1).architecture.slot_name
    names = {slot_name(name): name for name in checkpoint.infos}
    for own, is_tied in (("lm_head.weight", False), ("model.embed_tokens.weight", True)):
        if own in names:
            return names[own], is_tied
    raise CheckpointError(f"{source} has neither lm_head.weight nor embed_tokens.weight")


def _with_head(is_tied: bool, name: str, weight: Tensor) -> dict[str, Tensor]:
    return quantise_head(weight) | ({name: weight.clone()} if is_tied else {})


def _kept_weights(checkpoint: Checkpoint, wanted: Collection[str]) -> list[str]:
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


def _write_config(
    source: Path, folder: Path, changes: dict[str, Any], quantization_config: dict[str, Any]
) -> None:
    config = json.loads((source / "config.json").read_text()) | changes
    if "text_config" in config:
        config["text_config"] |= changes
    config["quantization_config"] = quantization_config
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def _write_weights(
    checkpoint: Checkpoint,
    folder: Path,
    quantisers: Mapping[str, Quantise],
) -> None:
    weight_map: dict[str, str] = {}
    pending: dict[str, Tensor] = {}
    files = {name: info.file.name for name, info in checkpoint.infos.items()}
    total_bytes = 0
    last = {file: name for name, file in files.items()}
    for name, tensor in tqdm(checkpoint.tensors(), "Quantising", len(files), unit="tensor"):
        tensor = tensor.contiguous()  # a part of a transposed stack is not
        try:
            quantise = quantisers.get(name)
            pieces = quantise(name, tensor) if quantise else {name: tensor.clone()}
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
