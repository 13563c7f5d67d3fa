"""A model spread over two GPUs computes what it does on one.

Where no sum is cut (stages, engines of their own) the tokens are the same, and in float32 they are
however the model is cut, but for ties. Else sums over ranks are rounded in another order, and in
bfloat16 with FP8 activations and a router that picks experts, a random model's next tokens soon
differ. So each engine says how likely the tokens it wrote were, the CPU says it exactly for the
same text, and two GPUs must be no further from that than one is.
"""

import gc
import json
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest
import torch
from children import NO_GPU, environment
from entrypoints.serving import started_server
from tiny_models import build_model

from vllm import LLM, SamplingParams
from vllm.architectures.registry import builtin_config
from vllm.distributed import world
from vllm.distributed.layout import Layout
from vllm.errors import EngineDeadError
from vllm.model_executor.quantize import quantize_checkpoint

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]
# Sizes of real heads and whole scale blocks on each rank, so that the kernels are those of real
# models.
SIZES = {
    "hidden_size": 512, "intermediate_size": 1024, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 128, "vocab_size": 512,
}  # fmt: skip
EXPERTS = {"num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 256}
HYBRID = {"head_dim": 256, "linear_key_head_dim": 128, "linear_value_head_dim": 128}
ARCHITECTURES = {
    "qwen3": {},
    "qwen3_moe": EXPERTS,
    "qwen3_5_moe": HYBRID | EXPERTS | {"shared_expert_intermediate_size": 256},
}
NUM_TOKENS = 32
LENGTHS = (1, 2, 16, 33, 65, 129, 200, 3)
Text = tuple[list[int], list[float]]
"""Tokens and their logprobs."""
EXACT = """
import json, sys
from vllm import LLM, SamplingParams
texts = json.load(open(sys.argv[2]))
llm = LLM(sys.argv[1], skip_tokenizer_init=True, dtype="float32", max_model_len=512)
params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0, detokenize=False)
outputs = llm.generate([{"prompt_token_ids": t} for t in texts], params, use_tqdm=False)
json.dump([[entry[token].logprob for entry, token in zip(o.prompt_logprobs[1:], text[1:])]
           for o, text in zip(outputs, texts)], open(sys.argv[3], "w"))
"""
# The error of 256 tokens is a mean with a spread; what is wrong is wrong by far more.
MOST_TIMES = 1.5
# Of tokens in float32, of which either may come: the delta rule rounds prompts to half precision.
TIE_NATS = 1e-3
# Of each GPU, for a model of 35 billion weights: other tests run beside it.
BYTES_OF_35_BILLION = 34e9
OPTIONS = {
    "max_num_seqs": 6, "max_model_len": 512, "num_gpu_blocks_override": 400,
    "skip_tokenizer_init": True,
}  # fmt: skip
FLAGS = ("--max-num-seqs", "6", "--max-model-len", "512", "--num-gpu-blocks-override", "400",
         "--skip-tokenizer-init")  # fmt: skip
TP, PP, EP = "tensor_parallel_size", "pipeline_parallel_size", "enable_expert_parallel"


# Kernels that nothing has to be compiled for when the engine starts.
VARIABLES = {"VLLM_USE_DEEP_GEMM": "0"}


@pytest.fixture(autouse=True, scope="session")
def variables():
    with pytest.MonkeyPatch.context() as patch:
        for name, value in VARIABLES.items():
            patch.setenv(name, value)
        yield


def prompts() -> list[list[int]]:
    rng = random.Random(0)
    return [[rng.randrange(3, SIZES["vocab_size"]) for _ in range(n)] for n in LENGTHS]


def load(folder: Path, **options) -> LLM:
    gc.collect()
    torch.cuda.empty_cache()
    return LLM(folder, **OPTIONS | options)


def written(llm: LLM, one_by_one: bool = False) -> list[Text]:
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=0,
                            detokenize=False)  # fmt: skip
    given = [{"prompt_token_ids": p} for p in prompts()]
    outputs = [
        output
        for some in ([[one] for one in given] if one_by_one else [given])
        for output in llm.generate(some, params, use_tqdm=False)
    ]
    return [
        ([*out.token_ids], [e[t].logprob for e, t in zip(out.logprobs, out.token_ids)])
        for out in (output.outputs[0] for output in outputs)
    ]


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    made: dict[str, Path] = {}

    def make(name: str) -> Path:
        if name not in made:
            plain, made[name] = (tmp_path_factory.mktemp(name) / kind for kind in ("plain", "fp8"))
            model = build_model(name, **(SIZES | ARCHITECTURES[name]))
            model.to(torch.bfloat16).save_pretrained(plain)
            quantize_checkpoint(plain, made[name], "fp8-block")
        return made[name]

    return make


@pytest.fixture(scope="session")
def of_one_gpu(folder):
    """What one process writes, by model and type of activations."""
    found: dict[tuple[str, str], list[Text]] = {}

    def texts(name: str, dtype: str = "auto") -> list[Text]:
        if (name, dtype) not in found:
            found[name, dtype] = written(load(folder(name), dtype=dtype))
        return found[name, dtype]

    return texts


@pytest.fixture
def error(tmp_path):
    """error(folder, texts): how far the logprobs of texts are from exact ones, in nats on
    average."""

    def measure(folder: Path, texts: list[Text]) -> float:
        whole, scores = tmp_path / "whole.json", tmp_path / "scores.json"
        whole.write_text(json.dumps([p + tokens for p, (tokens, _) in zip(prompts(), texts)]))
        words = [sys.executable, "-c", EXACT, folder, whole, scores]
        subprocess.run(words, env=environment(**NO_GPU), check=True)
        exact = [score for row in json.loads(scores.read_text()) for score in row[-NUM_TOKENS:]]
        own = [logprob for _, logprobs in texts for logprob in logprobs]
        return sum(abs(a - b) for a, b in zip(own, exact, strict=True)) / len(own)

    return measure


def check_equal(expected: list[Text], texts: list[Text]) -> None:
    assert [tokens for tokens, _ in texts] == [tokens for tokens, _ in expected]


def num_ties(expected: list[Text], texts: list[Text]) -> int:
    """How many texts differ, each from a tie on; anything else fails."""
    count = 0
    for (tokens, logprobs), (others, other_logprobs) in zip(expected, texts, strict=True):
        differing = (i for i, (a, b) in enumerate(zip(tokens, others, strict=True)) if a != b)
        if (first := next(differing, None)) is not None:
            assert abs(logprobs[first] - other_logprobs[first]) < TIE_NATS, (tokens, others)
            count += 1
    return count


def check_close(one: float, two: float) -> None:
    print(f"from exact logprobs: one GPU {one:.4f} nats, two {two:.4f}")
    assert 0 < two <= MOST_TIMES * one


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("qwen3", {TP: 2}),
        ("qwen3", {TP: 2, "enforce_eager": True, "max_num_batched_tokens": 48}),
        ("qwen3_moe", {TP: 2}),
        ("qwen3_moe", {TP: 2, EP: True}),
        ("qwen3_5_moe", {TP: 2}),
        ("qwen3_5_moe", {TP: 2, EP: True}),
        ("qwen3_5_moe", {TP: 2, EP: True, "enforce_eager": True}),
    ],
)
def test_ranks_that_share_layers(name, options, folder, of_one_gpu, error):
    one, two = of_one_gpu(name), written(load(folder(name), **options))
    check_close(error(folder(name), one), error(folder(name), two))


@pytest.mark.parametrize("is_expert_parallel", [False, True])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_tokens_in_float32_are_those_of_one_gpu(name, is_expert_parallel, folder, of_one_gpu):
    if is_expert_parallel and name == "qwen3":
        pytest.skip("it has no experts")
    options = {TP: 2, EP: is_expert_parallel, "dtype": "float32"}
    ties = num_ties(of_one_gpu(name, "float32"), written(load(folder(name), **options)))
    print(f"{ties} of {len(LENGTHS)} texts differ from a tie on")
    assert ties <= 1


def test_experts_reached_by_all_to_all(folder, of_one_gpu, error, monkeypatch):
    monkeypatch.setenv("VLLM_ALL2ALL_BACKEND", "naive")
    name = "qwen3_moe"
    one, two = of_one_gpu(name), written(load(folder(name), **{TP: 2, EP: True}))
    check_close(error(folder(name), one), error(folder(name), two))


@pytest.mark.parametrize("options", [{}, {"enforce_eager": True}])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_stages(name, options, folder, of_one_gpu):
    check_equal(of_one_gpu(name), written(load(folder(name), **{PP: 2}, **options)))


@pytest.mark.parametrize(
    ("name", "flags"),
    [
        ("qwen3", ()),
        ("qwen3_moe", ("--enable-expert-parallel",)),
        ("qwen3_5_moe", ("--enable-expert-parallel",)),
        ("qwen3_5_moe", ("--enable-expert-parallel", "--enforce-eager")),
    ],
)
def test_two_engines(name, flags, folder, of_one_gpu, error, tmp_path):
    """Engines on their own get two requests at a time, one each: which others a request is computed
    with decides which kernels compute it."""
    at_once = len(LENGTHS) if flags else 2
    one = of_one_gpu(name) if flags else written(load(folder(name)), one_by_one=True)
    found: dict[int, Text] = {}
    words = (*FLAGS, "--data-parallel-size", "2", *flags)
    with started_server(folder(name), tmp_path / "log", *words, **VARIABLES) as server:

        def run(index: int) -> None:
            body = {"model": "tiny", "prompt": prompts()[index], "max_tokens": NUM_TOKENS}
            body |= {"temperature": 0, "ignore_eos": True, "return_token_ids": True, "logprobs": 0}
            choice = server.post("/v1/completions", body).json["choices"][0]
            found[index] = choice["token_ids"], choice["logprobs"]["token_logprobs"]

        run(0)  # one engine alone has a request
        for first in range(0, len(LENGTHS), at_once):
            indices = range(first, first + at_once)
            threads = [threading.Thread(target=run, args=(i,)) for i in indices]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
    two = [found[index] for index in range(len(LENGTHS))]
    if not flags:
        check_equal(one, two)
    check_close(error(folder(name), one), error(folder(name), two))


def test_a_rank_that_hangs_ends_the_engine(folder):
    seconds = 5.0
    llm = load(folder("qwen3"), **{TP: 2, "distributed_timeout_seconds": seconds})
    written(llm)
    os.kill(llm.llm_engine.core.executor._handles[1].process._process.pid, signal.SIGSTOP)
    begin = time.monotonic()
    # Logprobs are waited for while a step is launched, which only the engine can notice.
    with pytest.raises(EngineDeadError, match=r"rank 0 .* gave no answer within 5 s"):
        written(llm)
    assert seconds - 1 < time.monotonic() - begin < 4 * seconds


@pytest.mark.parametrize(
    "flags",
    [
        ("--tensor-parallel-size", "2"),
        ("--data-parallel-size", "2", "--enable-expert-parallel", "--max-model-len", "4096"),
    ],
)
def test_a_model_of_35_billion_weights_is_served(flags, tmp_path):
    config = builtin_config("Qwen/Qwen3.5-35B-A3B-FP8")
    (tmp_path / "config.json").write_text(json.dumps(config))
    share = BYTES_OF_35_BILLION / torch.cuda.get_device_properties(0).total_memory
    flags = (*flags, "--load-format", "dummy", "--kv-cache-dtype", "fp8", "--skip-tokenizer-init",
             "--max-num-seqs", "16", "--gpu-memory-utilization", f"{share:.3f}")  # fmt: skip
    begin = time.monotonic()
    log = tmp_path / "log"
    with started_server(tmp_path, log, *flags, start_seconds=200, **VARIABLES) as server:
        ready = time.monotonic()
        body = {"model": "tiny", "prompt": list(range(3, 67)), "max_tokens": 8, "temperature": 0}
        answer = server.post("/v1/completions", body | {"return_token_ids": True}).json
        print(f"{flags[0]}: ready after {ready - begin:.1f} s, {answer['usage']} in "
              f"{time.monotonic() - ready:.1f} s: {answer['choices'][0]['token_ids']}")  # fmt: skip
    assert answer["usage"]["completion_tokens"] == 8


# ---------------------------------------------------------------- short sums


ROWS, DIM = (1, 3, 64, 256), 1024


def inputs(rank: int, call: int, num_rows: int) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(2 * call + rank)
    shape = (num_rows, DIM)
    return torch.randn(shape, generator=generator, device="cuda", dtype=torch.bfloat16)


def add_up(rank: int, address: tuple[str, int]) -> str:
    """Body of a rank; says which sum was not that of both ranks' inputs."""
    from vllm.distributed.custom_all_reduce import make_custom_all_reduce

    torch.cuda.set_device(rank)
    group = world.join(Layout(rank, tensor_size=2), False, address, "cuda", 60.0, {}).tensor
    sums = make_custom_all_reduce(group, DIM, torch.bfloat16)
    if sums is None:
        return "there are none"
    wrong = eager_sums(sums, rank) or graphed_sums(sums, rank)
    world.leave()
    return wrong


def expected_sum(call: int, num_rows: int) -> torch.Tensor:
    a, b = (inputs(rank, call, num_rows).float() for rank in range(2))
    return (a + b).bfloat16()


def eager_sums(sums, rank: int) -> str:
    from vllm.kernels.device_ops import usable_ops

    weight = torch.rand(DIM, device="cuda")
    for call, num_rows in enumerate(ROWS * 5):
        if call % 7 == 2 * rank:
            time.sleep(0.05)  # one rank is late, then the other
        wanted = expected_sum(call, num_rows)
        if not torch.equal(sums.all_reduce(inputs(rank, call, num_rows)), wanted):
            return f"sum {call} of {num_rows} rows"
        x, residual = inputs(rank, call, num_rows), wanted.roll(1, 0)
        both = wanted.clone(), residual.clone()
        usable_ops("cuda").fused_add_rms_norm(*both, weight, 1e-6)
        sums.add_rms_norm(x, residual, weight, 1e-6)
        if not (torch.equal(x, both[0]) and torch.equal(residual, both[1])):
            return f"norm {call} of {num_rows} rows"
        if wrong := wrong_quantised(sums, inputs(rank, call, num_rows), wanted, weight):
            return f"{wrong} of call {call}, {num_rows} rows"
    return ""


def wrong_quantised(sums, x, total, weight) -> str:
    """Beside the quantising norm of what was added up before, in every layout."""
    from vllm.kernels.activations import InputQuant
    from vllm.ops.fp8_quant import ScaleLayout

    for layout in ScaleLayout:
        for keeps_source in (False, True):
            quant = InputQuant(layout, keeps_source=keeps_source)
            residual = total.roll(2, 0)
            wanted_residual = residual.clone()
            wanted = quant.add_rms_norm(total.clone(), wanted_residual, weight, 1e-6)
            found = quant.sum_and_norm(sums, x, residual, weight, 1e-6)
            pairs = [(residual, wanted_residual), (found.scales, wanted.scales)]
            pairs += [(found.q.view(torch.uint8), wanted.q.view(torch.uint8))]
            if keeps_source:
                pairs += [(found.source, wanted.source)]
            if not all(torch.equal(a, b) for a, b in pairs):
                return f"{layout}"
    return ""


def graphed_sums(sums, rank: int) -> str:
    xs = [inputs(rank, 0, num_rows) for num_rows in ROWS]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for x in xs:
            sums.all_reduce(x)
    for call in range(200):
        for x in xs:
            x.copy_(inputs(rank, call, len(x)))
        graph.replay()
        if not all(torch.equal(x, expected_sum(call, len(x))) for x in xs):
            return f"replay {call}"
    return ""


def test_short_sums_are_exact_in_any_order_of_arrival():
    listener = world.listen()
    address = listener.getsockname()[:2]
    store = world.host_store(listener)
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(2, context) as pool:  # which does not wait for a rank that died
        assert [*pool.map(add_up, range(2), [address] * 2)] == ["", ""]
    del store
