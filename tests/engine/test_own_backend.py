"""`--kernel PATTERN=file.py:Name`: a backend of a file serves the layers whose name matches."""

import json
import sys
from pathlib import Path

import pytest

from vllm import LLM, SamplingParams
from vllm.config.kernel import KernelConfig
from vllm.entrypoints.cli.main import main
from vllm.errors import ConfigError, KernelFailedError
from vllm.executor.facts import facts_of, probed_facts
from vllm.kernels import own_backend, registry
from vllm.kernels.evidence.passed import read_passed
from vllm.kernels.evidence.quarantine import read_failures
from vllm.kernels.select.decision import NoKernelError

FILE = """
from vllm.kernels.backends import cpu
from vllm.kernels.select.spec import KernelSpec

def spec(family="linear", **changes):
    given = {"backend": "mine", "family": family, "devices": frozenset({"cpu"}),
             "formats": frozenset({"fp32", "bf16"}), "dtypes": frozenset({"fp32"})}
    return KernelSpec(**given | changes)

class Mine:
    SPECS = (spec(), spec("moe"))

    def linear(self, problem, tensors, candidate):
        kernel = cpu.linear(problem, tensors, candidate)
        return lambda x: kernel(x) * FACTOR

    def moe(self, problem, tensors, candidate):
        kernel = cpu.moe(problem, tensors, candidate)
        return lambda x, weights, ids: kernel(x, weights, ids) * FACTOR

mine = Mine()
FACTOR = 1.0
"""
DOWN = "*.down_proj"
PROMPT = {"prompt_token_ids": [1, 2, 3]}


@pytest.fixture(autouse=True)
def own_folder(tmp_path, monkeypatch):
    """Nothing is remembered, on disk or in the process."""
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path / "cache"))
    yield
    registry._own.clear()
    own_backend._loaded.clear()
    for name in [name for name in sys.modules if name.startswith("vllm_kernel_")]:
        del sys.modules[name]
    for cached in (registry.backend_names, registry.specs, registry.built):
        cached.cache_clear()


@pytest.fixture
def file(tmp_path) -> Path:
    path = tmp_path / "mine.py"
    path.write_text(FILE)
    return path


def load(checkpoint, name: str = "llama", **options) -> LLM:
    limits = {"max_num_seqs": 4, "max_num_batched_tokens": 64}
    return LLM(checkpoint(name), skip_tokenizer_init=True, **limits, **options)


def chosen(llm: LLM) -> dict[str, str]:
    decisions = llm.llm_engine.core.executor.kernels()["decisions"]
    return {layer: d["chosen"] for d in decisions for layer in d["layers"]}


def tokens(llm: LLM) -> list[int]:
    greedy = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    return list(llm.generate([PROMPT], greedy, use_tqdm=False)[0].outputs[0].token_ids)


# ---------------------------------------------------------------- a start


def test_it_serves_the_layers_it_was_named_for_and_no_others(checkpoint, file):
    expected = tokens(load(checkpoint))
    llm = load(checkpoint, kernel=[f"{DOWN}={file}:mine"])
    served = chosen(llm)
    assert {layer for layer in served if served[layer] == "mine"} == {
        layer for layer in served if layer.endswith(".down_proj")
    }
    assert tokens(llm) == expected
    assert any(" mine torch" in name and "mine.py" in name for name in read_passed())
    # Of the same process, without the flag.
    assert "mine" not in chosen(load(checkpoint)).values()


def test_experts_too(checkpoint, file):
    llm = load(checkpoint, "qwen3_moe", kernel=[f"*.experts={file}:mine"])
    assert {backend for layer, backend in chosen(llm).items() if "experts" in layer} == {"mine"}


def test_one_that_is_wrong_by_3_percent_does_not_serve(checkpoint, file):
    file.write_text(FILE.replace("FACTOR = 1.0", "FACTOR = 1.03"))
    with pytest.raises(KernelFailedError, match=r"kernel mine .*relative error 3.00e-02"):
        load(checkpoint, kernel=[f"{DOWN}={file}:mine"])
    (failure,) = read_failures()
    assert failure.why == "numerics" and "mine.py" in failure.version
    with pytest.raises(NoKernelError, match=r"(?s)mine +numerics +quarantined on .*3\.00e-02"):
        load(checkpoint, kernel=[f"{DOWN}={file}:mine"])
    llm = load(checkpoint, kernel=[f"{DOWN}={file}:mine"], on_unmet="fallback")
    assert "mine" not in chosen(llm).values()
    # One that says of itself that it emulates is compared too.
    file.write_text(file.read_text() + "\nMine.SPECS = (spec(is_emulation=True),)\n")
    with pytest.raises(KernelFailedError, match=r"kernel mine .*relative error 3\.00e-02"):
        load(checkpoint, kernel=[f"{DOWN}={file}:mine"])
    # A repaired file is another kernel.
    file.write_text(FILE)
    assert "mine" in chosen(load(checkpoint, kernel=[f"{DOWN}={file}:mine"])).values()


def test_every_rank_loads_the_file(checkpoint, file):
    kernel = [f"{DOWN}={file}:mine"]
    llm = load(checkpoint, kernel=kernel, tensor_parallel_size=2)
    try:
        assert "mine" in chosen(llm).values()
        assert len(tokens(llm)) == 8
    finally:
        llm.llm_engine.core.shutdown()


@pytest.mark.slow
def test_all_ranks_end_when_it_is_wrong_on_them(checkpoint, file):
    file.write_text(FILE.replace("FACTOR = 1.0", "FACTOR = 1.03"))
    kernel = [f"{DOWN}={file}:mine"]
    with pytest.raises(KernelFailedError, match=r"kernel mine .*relative error 3.00e-02"):
        load(checkpoint, kernel=kernel, tensor_parallel_size=2)
    assert {f.backend for f in read_failures()} == {"mine"}


def test_ranks_with_other_files_are_told_apart(checkpoint, file):
    llm = load(checkpoint, kernel=[f"{DOWN}={file}:mine"])
    name = "backends of other packages and of files"
    first = facts_of(llm.llm_engine.core.config, probed_facts())[name]
    file.write_text(FILE + "\n")
    KernelConfig(kernel=(f"{DOWN}={file}:mine",))
    second = facts_of(llm.llm_engine.core.config, probed_facts())[name]
    assert first != second and first.startswith("mine.py ")


# ---------------------------------------------------------------- what is refused

BAD = {
    "1 / 0": "the file raises ZeroDivisionError: division by zero",
    "import nothing_of_this_name": "the file raises ModuleNotFoundError",
    "x = (": "the file raises SyntaxError",
    "raise SystemExit(3)": "the file raises SystemExit: 3",
    "nine = 9": "the file has no mine",
    FILE.replace("mine = Mine()", "mime = Mine()"): "did you mean mime?",
    FILE.replace("mine = Mine()", "mine = 3"): "SPECS is None; it takes a tuple of KernelSpec",
    f"{FILE}\nMine.SPECS = ()": "SPECS is ()",
    f"{FILE}\nMine.SPECS = ('linear',)": "SPECS has 'linear'; it takes KernelSpec",
    f"{FILE}\nMine.SPECS = (spec('attention'),)": "family 'attention'; it takes linear or moe",
    f"{FILE}\nMine.SPECS = (spec(backend='My Kernel'),)": "backend 'My Kernel'; it takes a name",
    f"{FILE}\nMine.SPECS = (spec(backend='cpu'),)": "a backend 'cpu' exists already",
    f"{FILE}\nMine.SPECS = (spec(devices='cpu'),)": "devices = 'cpu'; it takes a frozenset of cpu",
    f"{FILE}\nMine.SPECS = (spec(devices=frozenset({{'tpu'}})),)": "devices = frozenset({'tpu'})",
    f"{FILE}\nMine.SPECS = (spec(formats=frozenset({{'fp9'}})),)": "formats = frozenset({'fp9'})",
    f"{FILE}\nMine.SPECS = (spec(dtypes=frozenset()),)": "dtypes = frozenset()",
    f"{FILE}\nMine.SPECS = (spec(act=frozenset({{'some'}})),)": "act = frozenset({'some'})",
    f"{FILE}\nMine.BEFORE = 3": "BEFORE is for backends of packages; leave it out",
    f"{FILE}\nMine.SPECS = (spec(n_align=0),)": "n_align = 0; it takes a whole number",
    f"{FILE}\nMine.SPECS = (spec(compiles='gcc'),)": "compiles = 'gcc'; it takes '' or 'triton'",
    f"{FILE}\nMine.SPECS = (spec(), spec(backend='other'))": "SPECS name mine, other",
    f"{FILE}\nMine.SPECS = (spec(), spec(backend='mine-fast'))": "and one for each family",
    f"{FILE}\ndel Mine.moe": "SPECS has a kernel of family moe, and there is no moe(problem, ten",
    f"{FILE}\nMine.linear = lambda self, problem: 0": "its maker does not take linear(problem",
}


@pytest.mark.parametrize(("content", "text"), BAD.items(), ids=BAD.values())
def test_a_file_that_is_no_backend_is_one_error_and_nothing_is_loaded(file, capsys, content, text):
    file.write_text(content)
    words = ["--layer", "fp32:64x64", "--device", "cpu", "--kernel", f"*={file}:mine"]
    assert main(["kernels", "explain", *words]) == 2
    out, err = capsys.readouterr()
    assert text in err and f"--kernel *={file}:mine: " in err and err.count("\n") == 1
    assert not out
    assert not registry._own and not any(name.startswith("vllm_kernel_") for name in sys.modules)


@pytest.mark.parametrize("text", ["*=mine.py", "*=./mine.py:", "*=a/mine", "*=mine.py:Mine.x"])
def test_a_file_that_is_named_wrongly_is_refused_with_the_syntax(text):
    with pytest.raises(ConfigError, match=r"is written PATTERN=path/to/file.py:Name"):
        KernelConfig(kernel=(text,))


def test_a_file_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"none\.py:mine: cannot be read: No such file"):
        KernelConfig(kernel=(f"*={tmp_path}/none.py:mine",))


@pytest.mark.parametrize(
    ("pattern", "meant"),
    [
        ("*.dwn_proj", r"\*\.down_proj"),
        ("model.layers.0.mlp.gate_up_prj", r"model\.layers\.0\.mlp\.gate_up_proj"),
        ("*.self_atn.qkv_proj", r"\*\.self_attn\.qkv_proj"),
    ],
)
def test_a_pattern_that_matches_no_layer_is_refused_with_the_nearest(
    checkpoint, file, pattern, meant
):
    with pytest.raises(ConfigError, match=rf"no layer of this model; did you mean {meant}\W"):
        load(checkpoint, kernel=[f"{pattern}={file}:mine"])


# ---------------------------------------------------------------- explain


def test_it_is_explained(checkpoint, file, capsys, monkeypatch):
    monkeypatch.chdir(file.parent)
    words = ["explain", str(checkpoint("llama")), "--device", "cpu", "--kernel"]
    assert main(["kernels", *words, f"{DOWN}=mine.py:mine", "--json"]) == 0
    decisions = json.loads(capsys.readouterr().out)["decisions"]
    served = {layer: d for d in decisions for layer in d["layers"]}
    down = "model.layers.0.mlp.down_proj"
    assert served[down]["chosen"] == "mine" and "lm_head" in served
    assert served["lm_head"]["chosen"] == "cpu"
    others = json.dumps(served["lm_head"])
    assert "a backend of a file serves the layers that --kernel names" in others
    assert main(["kernels", *words, "*.dwn_proj=mine.py:mine"]) == 2
    assert "did you mean *.down_proj" in capsys.readouterr().err
