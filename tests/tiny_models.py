"""Tiny random checkpoints of every architecture, written with transformers, and a tokenizer."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tiny_configs import ARCHITECTURES, COMMON, MULTIMODAL, VOCAB, WITHOUT_HEAD_DIM
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedTokenizerFast,
)


def _mistral3_config(text: dict):
    vision = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "head_dim": 16,
        "image_size": 28,
        "patch_size": 14,
    }
    return CONFIG_MAPPING["mistral3"](
        text_config={"model_type": "mistral", "sliding_window": None} | text,
        vision_config=vision | {"model_type": "pixtral"},
        tie_word_embeddings=text.get("tie_word_embeddings", False),
        image_token_index=5,
    )


def _kimi_k25_config(text: dict):
    vision = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "patch_size": 14,
    }
    return CONFIG_MAPPING["kimi_k25"](
        text_config=text | {"model_type": "deepseek_v3"},
        vision_config=vision,
        projection_hidden_size=32,
        tie_word_embeddings=False,
        image_token_id=VOCAB,  # which its model masks
        video_token_id=VOCAB,
    )


# Of vision towers, which are not loaded.
_VISION = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
}


def _gemma3_config(text: dict):
    vision = _VISION | {"image_size": 28, "patch_size": 14}
    return CONFIG_MAPPING["gemma3"](
        text_config=text | {"model_type": "gemma3_text"},
        vision_config=vision | {"model_type": "siglip_vision_model"},
        image_token_index=5,
    )


def _gemma4_config(text: dict):
    vision = _VISION | {"head_dim": 16, "global_head_dim": 16, "patch_size": 4}
    return CONFIG_MAPPING["gemma4"](
        text_config=text | {"model_type": "gemma4_text"},
        vision_config=vision | {"model_type": "gemma4_vision"},
        audio_config=None,
        image_token_id=VOCAB,  # which its model masks
        video_token_id=VOCAB,
        audio_token_id=VOCAB,
    )


def _llama4_config(text: dict):
    vision = {
        "hidden_size": 32,
        "intermediate_size": 128,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 28,
        "patch_size": 14,
        "vision_output_dim": 32,
        "projector_input_dim": 32,
        "projector_output_dim": 32,
    }
    return CONFIG_MAPPING["llama4"](text_config=text, vision_config=vision, image_token_index=5)


def _qwen_config(model_type: str, text: dict):
    vision = {
        "depth": 1,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_heads": 2,
        "patch_size": 4,
        "out_hidden_size": text["hidden_size"],
        "num_position_embeddings": 16,
        "deepstack_visual_indexes": [0],
    }
    return CONFIG_MAPPING[model_type](
        text_config=text | {"model_type": MULTIMODAL[model_type]},
        vision_config=vision,
        tie_word_embeddings=text.get("tie_word_embeddings", False),
        image_token_id=5,
    )


def build_model(name: str, seed: int = 0, **changes):
    """A random transformers model. Weights are spread widely, so that logits are not all alike."""
    model_type, differences = ARCHITECTURES[name]
    fields = COMMON | differences | changes
    fields = {name: value for name, value in fields.items() if (name, value) != ("head_dim", None)}
    if model_type in WITHOUT_HEAD_DIM:
        del fields["head_dim"]
        fields["hidden_size"] = 16 * fields["num_attention_heads"]
    torch.manual_seed(seed)
    if model_type in MULTIMODAL:
        makers = {
            "mistral3": _mistral3_config,
            "gemma3": _gemma3_config,
            "gemma4": _gemma4_config,
            "kimi_k25": _kimi_k25_config,
            "llama4": _llama4_config,
        }
        make = makers.get(model_type) or partial(_qwen_config, model_type)
        config = make(fields)
        model = AutoModelForImageTextToText.from_config(config)
    else:
        model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[model_type](**fields))
    model = model.float().eval()
    with torch.no_grad():
        for buffer_name, buffer in model.named_buffers():
            if buffer_name.endswith("e_score_correction_bias"):
                buffer.normal_(0, 0.2)
            elif buffer_name.endswith("layer_scalar"):
                buffer.uniform_(0.7, 1.3)
        for parameter_name, parameter in model.named_parameters():
            if parameter_name.endswith(("norm.weight", "norm_f.weight", "expert_scale")):
                parameter.uniform_(0.5, 1.5)
            elif parameter_name.endswith("A_log"):  # memories of a few to a few hundred tokens
                parameter.uniform_(-6.0, -1.0)
            elif parameter.ndim == 1:
                parameter.normal_(0, 0.2)
            else:
                parameter.normal_(0, 1.3 / parameter.shape[-1] ** 0.5)
    return model


def save(model, folder: Path) -> None:
    """Under the names of published checkpoints. transformers writes decoder layers of kimi_k25 as
    the blocks that only its vision tower has."""
    model.save_pretrained(folder)
    if model.config.model_type == "kimi_k25":
        file = folder / "model.safetensors"
        tensors = {n.replace("_model.model.blocks.", "_model.model.layers."): t
                   for n, t in load_file(file).items()}  # fmt: skip
        save_file(tensors, file, metadata={"format": "pt"})


@contextmanager
def one_thread() -> Iterator[None]:
    """For torch on tiny tensors, where threads wait for one another longer than they compute."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


CORPUS = [
    "the quick brown fox jumps over the lazy dog",
    "Pack my box with five dozen liquor jugs, please!",
    "naïve café — déjà vu; 日本語 🙂 äöü",
    '{"name": "value", "number": 12345}',
]
CHAT_TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def make_tokenizer(vocab_size: int = 400) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer trained on CORPUS: every text has tokens, characters may split."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<pad>", "<s>", "<|end|>", "<|user|>", "<|assistant|>", "<|system|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(CORPUS * 3, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="<|end|>", pad_token="<pad>"
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast
