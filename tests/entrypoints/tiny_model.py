"""A tiny Llama with random weights and a byte-level tokenizer, written to a folder."""

import json
from pathlib import Path

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['content'] == 'refuse me' %}{{ raise_exception('refused') }}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if shout is defined %}{{ shout }}{% endif %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
VOCAB_SIZE = 512
MAX_MODEL_LEN = 2048


def write_tiny_llama(folder: Path) -> Path:
    """Writes the checkpoint; the weights are large enough for greedy text that varies."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    _write_tokenizer(folder)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=MAX_MODEL_LEN,
        initializer_range=0.2,
        bos_token_id=0,
        eos_token_id=2,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    generation = {"eos_token_id": 2, "temperature": 0.7, "top_k": 40}
    (folder / "generation_config.json").write_text(json.dumps(generation))
    return folder


def _write_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    words = [f"{a}{b}{c}" for a in "bdfhklmnprst" for b in "aeiou" for c in ("n", "st", "ck", "")]
    tokenizer.train_from_iterator([" ".join(words)] * 4, trainer)
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=SPECIAL_TOKENS[0],
        eos_token=SPECIAL_TOKENS[2],
        chat_template=CHAT_TEMPLATE,
    ).save_pretrained(folder)
