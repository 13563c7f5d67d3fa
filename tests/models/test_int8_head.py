"""`vllm quantize --lm-head int8`: an output projection of int8 beside layers of another format."""

import json

import pytest
import torch
from safetensors.torch import load_file
from test_fp8 import SHAPE as UNEVEN
from test_fp8 import dequantise, logprobs, reference_logprobs
from test_other_formats import widened
from transformers import AutoModelForCausalLM

from vllm import LLM
from vllm.entrypoints.cli.main import main
from vllm.errors import CheckpointError
from vllm.model_executor.quantize import quantize_checkpoint

SHAPE = UNEVEN | {"hidden_size": 192}


def head_of(stored: dict[str, torch.Tensor]) -> torch.Tensor:
    groups = stored["lm_head.weight"].float().unflatten(1, (-1, 32))
    return (groups * stored["lm_head.weight_scale"].float().unsqueeze(2)).flatten(1)


@pytest.mark.parametrize("is_tied", [True, False])
@pytest.mark.parametrize("format_name", ["fp8-block", "w4a16"])
def test_logits_are_those_of_the_dequantised_weights(checkpoint, tmp_path, format_name, is_tied):
    shape = SHAPE | {"intermediate_size": 320} if format_name == "w4a16" else SHAPE
    source, target = checkpoint("llama", tie_word_embeddings=is_tied, **shape), tmp_path / "out"
    argv = ["quantize", str(source), str(target), "--format", format_name, "--lm-head", "int8"]
    assert main(argv) == 0
    plain, stored = load_file(source / "model.safetensors"), load_file(target / "model.safetensors")
    assert torch.equal(stored["model.embed_tokens.weight"], plain["model.embed_tokens.weight"])
    assert stored["lm_head.weight"].dtype == torch.int8
    own = plain["model.embed_tokens.weight" if is_tied else "lm_head.weight"].float()
    wide = head_of(stored)
    step = stored["lm_head.weight_scale"].float().repeat_interleave(32, 1)
    assert bool(((wide - own).abs() <= 0.56 * step).all())
    assert not json.loads((target / "config.json").read_text())["tie_word_embeddings"]

    others = {n: t for n, t in stored.items() if not n.startswith("lm_head")}
    weights = dequantise(others) if format_name == "fp8-block" else widened(others)
    assert len(weights) == 2 * 7
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    model.config.tie_word_embeddings = False
    model.lm_head.weight = torch.nn.Parameter(wide)
    untied = tmp_path / "untied"
    model.save_pretrained(untied)
    wanted = reference_logprobs(untied, weights)
    assert (logprobs(target) - wanted).abs().max() < 1e-4


def test_the_projection_is_served_from_int8(checkpoint, tmp_path):
    source = checkpoint("llama", tie_word_embeddings=True, **SHAPE)
    quantize_checkpoint(source, tmp_path / "out", "fp8-block", has_int8_head=True)
    llm = LLM(tmp_path / "out", skip_tokenizer_init=True, max_num_seqs=4)
    records = dict(llm.llm_engine.core.selection.records)
    assert records["lm_head"].problem.format == "int8-group"
    formats = {decision.problem.format for name, decision in records.items() if "proj" in name}
    assert formats == {"fp8-block"}


def test_rows_that_are_not_whole_groups_are_refused(checkpoint, tmp_path):
    with pytest.raises(CheckpointError, match=r"embed_tokens.weight: 180 columns.*groups of 32"):
        quantize_checkpoint(
            checkpoint("llama", tie_word_embeddings=True, **UNEVEN),
            tmp_path / "out",
            "fp8-block",
            has_int8_head=True,
        )
    assert not (tmp_path / "out").exists()
