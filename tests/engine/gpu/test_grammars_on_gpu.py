"""Texts that follow a grammar on a GPU, beside others, and nothing compiles for them."""

import json
import re

import pytest
from tiny_models import build_model, make_tokenizer

from vllm import LLM, SamplingParams
from vllm.sampling_params import StructuredOutputsParams

pytest.importorskip("xgrammar")
pytestmark = pytest.mark.gpu
SIZES = {
    "hidden_size": 512, "intermediate_size": 1024, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 128,
}  # fmt: skip
SCHEMA = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}, "kind": {"enum": ["a", "b"]}},
    "required": ["ok", "kind"],
    "additionalProperties": False,
}
PROMPT = "the quick brown"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path, tokenizer = tmp_path_factory.mktemp("model"), make_tokenizer()
    tokenizer.save_pretrained(path)
    build_model("qwen3", **SIZES, vocab_size=len(tokenizer)).bfloat16().save_pretrained(path)
    return str(path)


def following(seed: int | None = None, **grammar) -> SamplingParams:
    temperature = 0.0 if seed is None else 1.0
    return SamplingParams(temperature=temperature, seed=seed, max_tokens=100,
                          structured_outputs=StructuredOutputsParams(**grammar))  # fmt: skip


@pytest.mark.parametrize("is_eager", [False, True])
def test_each_text_follows_its_own_grammar_and_the_others_none(folder, is_eager):
    llm = LLM(folder, max_num_seqs=8, max_model_len=256, num_gpu_blocks_override=200,
              enforce_eager=is_eager)  # fmt: skip
    plain = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    params = [
        plain,
        following(json=SCHEMA),
        following(regex="[a-c]{3}-[0-9]{2}", seed=1),
        following(choice=["red", 'gre"en'], seed=2),
        plain,
    ]
    alone = llm.generate([PROMPT] * 2, [plain] * 2, use_tqdm=False)[0].outputs[0].token_ids
    outputs = llm.generate([PROMPT] * len(params), params, use_tqdm=False)
    assert not llm.llm_engine.core.stats().compile_waits
    texts = [output.outputs[0].text for output in outputs]
    assert set(json.loads(texts[1])) == {"ok", "kind"}
    assert re.fullmatch("[a-c]{3}-[0-9]{2}", texts[2])
    assert texts[3] in ("red", 'gre"en')
    # The same logits as alone where no sum is over several rows: the first token at least.
    assert {output.outputs[0].token_ids[0] for output in (outputs[0], outputs[4])} == {alone[0]}
    assert len(outputs[0].outputs[0].token_ids) == len(outputs[4].outputs[0].token_ids) == 12
