"""Greedy tokens on the GPU are those of the CPU for tiny random models of every architecture.

Activations on the GPU are bfloat16, so where two tokens tie either may come, and a router may take
the other of two experts. How often, and how near a tie, is known from the CPU: the same model in
bfloat16 beside float32. The GPU may be no further from float32 than that. In FP8 layers the CPU
rounds activations as this chip's kernels do. A text is compared up to its first other token.
"""

import gc
import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import pytest
import torch
from tiny_models import build_model

from vllm import LLM, SamplingParams
from vllm.model_executor.quantize import quantize_checkpoint

pytestmark = pytest.mark.gpu
ROOT = Path(__file__).parents[3]
# Sizes of real heads and whole scale blocks, so that the kernels are those of real models.
SIZES = {
    "hidden_size": 512, "intermediate_size": 512, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 128, "vocab_size": 512,
}  # fmt: skip
EXPERTS = {"num_experts": 10, "num_experts_per_tok": 3, "moe_intermediate_size": 256}
HYBRID = {"head_dim": 256, "linear_key_head_dim": 128, "linear_value_head_dim": 128}
ARCHITECTURES = {
    "llama": {},
    "qwen3": {},
    "qwen3_moe": EXPERTS,
    "qwen3_5": HYBRID,
    "qwen3_5_moe": HYBRID | EXPERTS | {"shared_expert_intermediate_size": 256},
}
NUM_TOKENS = 16
# Requests of 1 to 200 tokens, more than one graph holds; some span chunks and blocks of the cache.
LENGTHS = (1, 2, 7, 16, 33, 64, 65, 129, 200, 3, 20, 5)
# Of the texts' leading tokens that equal the reference's; few texts make it a rough number.
LEAST_SHARE = 0.6
DTYPES = ("float32", "bfloat16")
ON_THE_CPU = """
import json, sys
from vllm import LLM, SamplingParams
folder, dtype, num_tokens, prompts, file = sys.argv[1:]
emulated = {"linear_backend": "emulate:sm_90", "moe_backend": "emulate:sm_90"}
llm = LLM(folder, skip_tokenizer_init=True, dtype=dtype, max_model_len=512,
          **(emulated if folder.endswith("fp8-model") else {}))
params = SamplingParams(temperature=0, max_tokens=int(num_tokens), ignore_eos=True, logprobs=20,
                        detokenize=False)
inputs = [{"prompt_token_ids": p} for p in json.loads(prompts)]
outputs = llm.generate(inputs, params, use_tqdm=False)
json.dump([[o.outputs[0].token_ids, [{t: e.logprob for t, e in p.items()}
            for p in o.outputs[0].logprobs]] for o in outputs], open(file, "w"))
"""


def prompts() -> list[list[int]]:
    rng = random.Random(0)
    return [[rng.randrange(3, SIZES["vocab_size"]) for _ in range(n)] for n in LENGTHS]


@pytest.fixture(scope="module", params=ARCHITECTURES)
def folders(request, tmp_path_factory) -> dict[str, Path]:
    """The model in bfloat16, and quantised."""
    plain, parent = (tmp_path_factory.mktemp(name) for name in ("bf16", "fp8"))
    model = build_model(request.param, **(SIZES | ARCHITECTURES[request.param]))
    # Layers that add to the embedding rather than drown it pass on less of a rounding.
    for name, parameter in model.named_parameters():
        if name.endswith("embed_tokens.weight"):
            parameter.data *= SIZES["hidden_size"] ** 0.5 / 1.3
        elif any(part in name for part in ("o_proj", "down_proj", "out_proj")):
            parameter.data *= 0.15
    model.to(torch.bfloat16).save_pretrained(plain)
    quantize_checkpoint(plain, parent / "fp8-model", "fp8-block")
    return {"bf16": plain, "fp8": parent / "fp8-model"}


@pytest.fixture(scope="module")
def of_the_cpu(folders, tmp_path_factory) -> dict[tuple[str, str], list]:
    """By kind and type of activations: tokens, and logprobs of the 20 likeliest at each place."""
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": paths}
    running, files = [], {}
    for kind, dtype in product(folders, DTYPES):
        files[kind, dtype] = file = tmp_path_factory.mktemp("cpu") / "tokens.json"
        words = [folders[kind], dtype, str(NUM_TOKENS), json.dumps(prompts()), file]
        running.append(subprocess.Popen([sys.executable, "-c", ON_THE_CPU, *words], env=env))
    assert [process.wait(240) for process in running] == [0] * len(files)
    return {key: json.loads(file.read_text()) for key, file in files.items()}


def engine(folder: Path, **options) -> LLM:
    gc.collect()
    torch.cuda.empty_cache()
    return LLM(folder, skip_tokenizer_init=True, max_num_seqs=8, max_model_len=512,
               num_gpu_blocks_override=400, **options)  # fmt: skip


def greedy(llm: LLM) -> list[list[int]]:
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True,
                            detokenize=False)  # fmt: skip
    outputs = llm.generate([{"prompt_token_ids": p} for p in prompts()], params, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


@dataclass(frozen=True)
class Nearness:
    """How near texts are to those of the reference. share: of leading tokens that are equal.
    num_ties: texts that leave it; largest_gap: how many nats less likely one then is."""

    share: float
    num_ties: int
    largest_gap: float

    @classmethod
    def of(cls, reference: list, texts: list[list[int]]) -> "Nearness":
        lengths, gaps = [], [0.0]
        for (tokens, likeliest), own in zip(reference, texts, strict=True):
            places = [i for i in range(NUM_TOKENS) if tokens[i] != own[i]]
            lengths.append(places[0] if places else NUM_TOKENS)
            if places:
                logprobs = likeliest[places[0]]
                other = logprobs.get(str(own[places[0]]), -float("inf"))
                gaps.append(logprobs[str(tokens[places[0]])] - other)
        return cls(sum(lengths) / NUM_TOKENS / len(texts), len(gaps) - 1, max(gaps))


def ways(folder: Path) -> Iterator[tuple[str, list[list[int]]]]:
    llm = engine(folder)
    yield "graphs", greedy(llm)
    yield "graphs, prompts cached where they can be", greedy(llm)
    del llm
    yield "eager, in chunks", greedy(engine(folder, enforce_eager=True, max_num_batched_tokens=48))


@pytest.mark.parametrize("kind", ["bf16", "fp8"])
def test_greedy_tokens_are_those_of_the_cpu(kind, folders, of_the_cpu):
    reference = of_the_cpu[kind, "float32"]
    rounded = Nearness.of(reference, [tokens for tokens, _ in of_the_cpu[kind, "bfloat16"]])
    print(f"the CPU in bfloat16: {rounded}")
    for way, texts in ways(folders[kind]):
        found = Nearness.of(reference, texts)
        print(f"{way}: {found}")
        assert found.share >= LEAST_SHARE * rounded.share, way
        assert found.largest_gap <= 3 * rounded.largest_gap + 0.5, way


def test_quantised_weights_give_other_tokens(of_the_cpu):
    """Else the tests of both formats would be one."""
    plain, quantised = (
        [tokens for tokens, _ in of_the_cpu[kind, "float32"]] for kind in ("bf16", "fp8")
    )
    assert plain != quantised
