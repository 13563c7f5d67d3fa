"""Greedy texts of the demo model on the GPU are those of the CPU, but where two tokens tie.

Needs the demo model under VLLM_CACHE_ROOT (`make serve` makes it), or what it is made of.
"""

import gc
import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence

import pytest
import torch
from children import NO_GPU, environment
from safetensors.torch import load_file, save_file

from vllm import LLM, SamplingParams
from vllm.entrypoints.demo import demo_model_path
from vllm.errors import CheckpointError
from vllm.utils.fp8 import dequantise_blocks

pytestmark = pytest.mark.gpu
NUM_TOKENS = 32
# Two tokens tie when they are nearer than this, in nats. bf16: logits between 16 and 32 are rounded
# to multiples of an eighth. FP8: rounding the activations to FP8 at all moves one pair of tokens in
# a hundred by more, and numbers computed in bf16 are rounded to other codes than those in float32.
TIE = {"bf16": 0.2, "fp8": 1.1}
TEXTS = (
    "The capital of France is",
    "Question: Tom picks 14 apples and gives 9 of them to his sister. How many are left?\nAnswer:",
    "def fibonacci(n):\n",
    "Water boils at 100 degrees Celsius because",
    "Once upon a time, in a small village by the sea, there lived an old",
    "The three primary colours are red,",
    "My grandmother told me that every morning, before the sun came up, she",
    "A train leaves at 8:40 and drives 75 kilometres an hour for two and a half hours. " * 6,
)
# Greedy texts with the first of some options, and how likely each of them finds these texts.
ON_THE_CPU = """
import json, sys
from test_demo_on_gpu import NUM_TOKENS, TEXTS, greedy, logprobs
from vllm import LLM
model, file, *all_options = sys.argv[1:]
llms = [LLM(model, max_model_len=512, max_num_seqs=16, **json.loads(o)) for o in all_options]
texts = greedy(llms[0])
scores = [logprobs(llm, texts).tolist() for llm in llms]
json.dump({"texts": texts, "scores": scores}, open(file, "w"))
"""


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, str]:
    """The demo model, and the same weights in bf16."""
    try:
        model, plain = demo_model_path(), tmp_path_factory.mktemp("bf16")
    except CheckpointError as error:
        pytest.skip(f"no demo model: {error}")
    tensors = load_file(model / "model.safetensors")
    for name in [n for n in tensors if n.endswith(".weight_scale")]:
        weight, scales = name.removesuffix("_scale"), tensors.pop(name)
        if weight == "lm_head.weight":
            groups = tensors[weight].float().unflatten(1, (-1, 32)) * scales.float().unsqueeze(2)
            tensors[weight] = groups.flatten(1).bfloat16()
        else:
            tensors[weight] = dequantise_blocks(tensors[weight], scales).bfloat16()
    save_file(tensors, plain / "model.safetensors", {"format": "pt"})
    config = json.loads((model / "config.json").read_text())
    del config["quantization_config"]
    (plain / "config.json").write_text(json.dumps(config))
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        (plain / name).write_bytes((model / name).read_bytes())
    return {"bf16": str(plain), "fp8": str(model)}


@pytest.fixture(scope="module")
def of_the_cpu(folders, tmp_path_factory) -> Iterator[Callable[[str], dict]]:
    """of_the_cpu(kind): `texts` and `scores`, once with FP8 activations as the GPU has them, once
    with float32. Computed in processes of their own from the first test on."""
    options = {"bf16": ["{}"], "fp8": ['{"linear_backend": "emulation"}', "{}"]}
    running, files = {}, {}
    for kind, folder in folders.items():
        files[kind] = tmp_path_factory.mktemp("cpu") / "texts.json"
        words = [sys.executable, "-c", ON_THE_CPU, folder, files[kind], *options[kind]]
        running[kind] = subprocess.Popen(words, env=environment(**NO_GPU))

    def read(kind: str) -> dict:
        assert running[kind].wait(240) == 0
        return json.loads(files[kind].read_text())

    yield read
    for process in running.values():
        process.kill()
        process.wait()


def engine(folder: str, **options) -> LLM:
    gc.collect()
    torch.cuda.empty_cache()
    return LLM(folder, max_model_len=512, max_num_seqs=16, num_gpu_blocks_override=600, **options)


def greedy(llm: LLM, prompts: Sequence = TEXTS) -> list[dict]:
    """Of each text: `prompt`, the `tokens` after it, and the logprobs of the likeliest at each."""
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=5)
    return [
        {
            "prompt": list(output.prompt_token_ids),
            "tokens": list(output.outputs[0].token_ids),
            "likeliest": [
                {str(token): entry.logprob for token, entry in place.items()}
                for place in output.outputs[0].logprobs
            ],
        }
        for output in llm.generate(list(prompts), params, use_tqdm=False)
    ]


def logprobs(llm: LLM, texts: list[dict]) -> torch.Tensor:
    """[texts, NUM_TOKENS]: of the tokens of each text, one after the other."""
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    prompts = [{"prompt_token_ids": text["prompt"] + text["tokens"]} for text in texts]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return torch.tensor(
        [
            [
                place[token].logprob
                for place, token in zip(o.prompt_logprobs[-NUM_TOKENS:], t["tokens"])
            ]
            for o, t in zip(outputs, texts)
        ]
    )


def num_ties(expected: list[dict], texts: list[dict], tie: float) -> int:
    """How many texts leave the CPU's at a place where its two tokens tie; else it is an error."""
    count = 0
    for cpu, gpu in zip(expected, texts, strict=True):
        places = [i for i in range(NUM_TOKENS) if cpu["tokens"][i] != gpu["tokens"][i]]
        if places:
            likeliest = cpu["likeliest"][places[0]]
            own = str(gpu["tokens"][places[0]])
            gap = likeliest[str(cpu["tokens"][places[0]])] - likeliest.get(own, -float("inf"))
            assert gap <= tie, f"token {places[0]} of {cpu['tokens']}: {own}, {gap} nats apart"
            count += 1
    return count


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("bf16", {}),
        ("fp8", {}),
        ("fp8", {"enforce_eager": True, "max_num_batched_tokens": 48}),
        ("fp8", {"kernel": ("*.down_proj=deep_gemm",)}),
    ],
)
def test_greedy_texts_are_those_of_the_cpu(kind, options, folders, of_the_cpu):
    """With a cached prefix too. FP8: what the GPU thinks of the CPU's texts differs by less than
    twice what rounding the activations does at all."""
    llm = engine(folders[kind], **options)
    of_cpu = of_the_cpu(kind)
    expected, scores = of_cpu["texts"], torch.tensor(of_cpu["scores"])
    ties = [num_ties(expected, greedy(llm), TIE[kind]) for _ in range(2)]
    gap = (logprobs(llm, expected) - scores[0]).abs().mean()
    limit = 2 * (scores[1] - scores[0]).abs().mean() if kind == "fp8" else 0.05
    print(
        f"{kind} {options}: {ties} ties of {len(TEXTS)} texts, {gap:.4f} nats (limit {limit:.4f})"
    )
    assert gap < limit
