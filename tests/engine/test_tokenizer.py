"""The tokenizer is the one that transformers chooses with the model's whole config at hand."""

import json
import shutil

import pytest
from transformers import AutoTokenizer

from vllm.config.model import ModelConfig
from vllm.engine.tokenizer import load_tokenizer
from vllm.errors import CheckpointError

TEXT = "one two<unk> three  fourth\n5"


@pytest.fixture
def folder(text_checkpoint, tmp_path):
    target = tmp_path / "model"
    shutil.copytree(text_checkpoint, target)
    return target


def edit(path, **changes):
    content = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({k: v for k, v in content.items() if v is not None}))


@pytest.mark.parametrize("tokenizer_class", [
    None, "TokenizersBackend", "PreTrainedTokenizerFast", "LlamaTokenizerFast", "Qwen2Tokenizer",
    "Qwen2TokenizerFast", "NoSuchTokenizer",
])  # fmt: skip
@pytest.mark.parametrize("model_type", ["llama", "qwen2", "qwen3", "mistral"])
def test_it_is_that_of_transformers(folder, model_type, tokenizer_class):
    edit(folder / "config.json", model_type=model_type)
    edit(folder / "tokenizer_config.json", tokenizer_class=tokenizer_class)
    theirs = AutoTokenizer.from_pretrained(folder)
    ours = load_tokenizer(ModelConfig(tokenizer=str(folder)))
    assert type(ours) is type(theirs)
    assert ours.all_special_ids == theirs.all_special_ids
    assert ours.chat_template == theirs.chat_template
    assert ours(TEXT).input_ids == theirs(TEXT).input_ids
    assert ours.init_kwargs == theirs.init_kwargs


def test_a_folder_without_a_model_may_hold_a_tokenizer(folder):
    (folder / "config.json").unlink()
    tokenizer = load_tokenizer(ModelConfig(tokenizer=str(folder)))
    assert tokenizer(TEXT).input_ids == AutoTokenizer.from_pretrained(folder)(TEXT).input_ids


def test_code_that_comes_with_a_tokenizer_does_not_run_unless_trusted(folder):
    (folder / "tokenization_evil.py").write_text("raise SystemExit('it ran')")
    auto_map = {"AutoTokenizer": [None, "tokenization_evil.Evil"]}
    edit(folder / "tokenizer_config.json", tokenizer_class="Evil", auto_map=auto_map)
    with pytest.raises(CheckpointError, match="custom code"):
        load_tokenizer(ModelConfig(tokenizer=str(folder)))
