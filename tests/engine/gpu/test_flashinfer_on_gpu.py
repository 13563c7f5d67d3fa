"""An engine whose attention is FlashInfer's writes what it writes with Triton's, but where two
tokens tie.

One kind of head, in bfloat16: the library compiles two modules for it, for a minute or more.
"""

import gc
import random

import pytest
import torch

pytest.importorskip("flashinfer")
from test_demo_on_gpu import NUM_TOKENS, TIE, greedy, logprobs, num_ties
from tiny_models import build_model

from vllm import LLM

pytestmark = pytest.mark.gpu
SIZES = {
    "hidden_size": 512, "intermediate_size": 1024, "num_attention_heads": 8,
    "num_key_value_heads": 2, "head_dim": 128, "vocab_size": 1024,
}  # fmt: skip
# More requests than run at a time; ends before, at and after those of a block of the cache.
LENGTHS = (1, 2, 15, 16, 17, 47, 64, 129, 200, 400)
CHUNKS = {"max_num_batched_tokens": 48}
# Between logprobs of one text, in nats. Two orders of sums in bfloat16 on the CPU: 0.013.
MEAN_GAP = 0.05


def prompts() -> list[dict]:
    rng = random.Random(0)
    return [{"prompt_token_ids": [rng.randrange(3, 1024) for _ in range(n)]} for n in LENGTHS]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("model")
    build_model("qwen3", **SIZES).to(torch.bfloat16).save_pretrained(path)
    return str(path)


def engine(folder: str, backend: str | None, **options) -> LLM:
    gc.collect()
    torch.cuda.empty_cache()
    return LLM(folder, skip_tokenizer_init=True, dtype="bfloat16", max_num_seqs=6,
               max_model_len=512, num_gpu_blocks_override=400, attention_backend=backend,
               **options)  # fmt: skip


def who_attends(llm: LLM) -> set[str]:
    decisions = llm.llm_engine.core.executor.kernels()["decisions"]
    return {d["chosen"] for d in decisions if d["problem"]["family"] == "attention"}


def written(llm: LLM) -> list[list[dict]]:
    """Greedy texts: once computed whole, and once after the prompts' cached blocks."""
    found = [greedy(llm, prompts()) for _ in range(2)]
    assert llm.llm_engine.core.stats().prefix_cache_hits > sum(LENGTHS) // 2
    return found


def check(llm: LLM, expected: list[list[dict]], scores: torch.Tensor) -> None:
    """scores: what the other engine thinks of the first texts that it wrote."""
    ties = [num_ties(a, b, TIE["bf16"]) for a, b in zip(expected, written(llm), strict=True)]
    gap = float((logprobs(llm, expected[0]) - scores).abs().mean())
    print(f"{ties} ties of {len(LENGTHS)} texts of {NUM_TOKENS} tokens, {gap:.4f} nats")
    assert gap < MEAN_GAP


@pytest.mark.parametrize("options", [{}, CHUNKS], ids=["whole", "chunks"])
@pytest.mark.parametrize("is_eager", [True, False], ids=["eager", "graphs"])
def test_texts_are_those_with_triton(folder, is_eager, options):
    llm = engine(folder, "triton", enforce_eager=is_eager, **options)
    assert who_attends(llm) == {"triton"}
    expected = written(llm)
    scores = logprobs(llm, expected[0])
    del llm
    llm = engine(folder, "flashinfer", enforce_eager=is_eager, **options)
    assert who_attends(llm) == {"flashinfer"}
    check(llm, expected, scores)
