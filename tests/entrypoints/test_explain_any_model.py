"""`vllm kernels explain MODEL` answers for any checkpoint, and for any GPU by its usual name."""

import json
import re
import subprocess
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest
from slow import quick

from vllm.architectures.registry import is_described
from vllm.entrypoints.cli.main import main
from vllm.kernels.report.json_report import parse_report, report
from vllm.kernels.report.question import device_of
from vllm.machine import CHIPS

from .serving import environment

CONFIGS = sorted((Path(__file__).parents[1] / "select" / "configs").glob("*.json"))
SM_100 = ("--device", "sm_100", "--libs", "all")


@pytest.fixture
def run(capsys):
    """run(*words) -> (exit code, stdout, stderr) of `vllm kernels explain`."""

    def run_command(*words: object) -> tuple[int, str, str]:
        code = main(["kernels", "explain", *map(str, words)])
        out, err = capsys.readouterr()
        return code, out, err

    return run_command


def config(name: str, **changes) -> dict:
    file = next(file for file in CONFIGS if file.stem.startswith(name))
    return json.loads(file.read_text()) | changes


def folder_of(path: Path, content: dict, tensors: dict[str, tuple[str, list[int]]] | None = None):
    """A folder with config.json and, for `tensors`, a safetensors file of zeros."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(content))
    if tensors:
        write_safetensors(path / "model.safetensors", tensors)
    return path


def write_safetensors(file: Path, tensors: dict[str, tuple[str, list[int]]]) -> None:
    header, end = {}, 0
    for name, (dtype, shape) in tensors.items():
        size = {"BF16": 2, "F8_E4M3": 1, "U8": 1}[dtype]
        for number in shape:
            size *= number
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + bytes(end))


TENSORS = {
    "model.layers.0.self_attn.q_proj.weight": ("BF16", [64, 32]),
    "model.layers.0.self_attn.k_proj.weight": ("BF16", [32, 32]),
    "model.layers.0.self_attn.v_proj.weight": ("BF16", [32, 32]),
    "model.layers.0.mlp.down_proj.weight": ("BF16", [32, 112]),
    "model.embed_tokens.weight": ("BF16", [50, 32]),
}
TINY = {
    "model_type": "unheard_of",
    "hidden_size": 32,
    "intermediate_size": 96,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 50,
    "dtype": "bfloat16",
}


# ---------------------------------------------------------------- published checkpoints


@pytest.mark.parametrize("device", quick(["sm_90", "sm_100"], ["sm_100"]))
@pytest.mark.parametrize("file", CONFIGS, ids=lambda file: file.stem)
def test_a_published_checkpoint_is_explained_and_it_is_said_if_it_is_not_served(run, file, device):
    code, out, err = run(file, "--device", device, "--libs", "all", "--json")
    content = json.loads(out)
    assert report(*parse_report(content)) == content
    is_served = is_described(json.loads(file.read_text()))
    assert content["model"]["served"] is is_served
    assert is_served or "is not served by this engine" in content["model"]["notes"][0]
    assert code == (0 if all(d["chosen"] for d in content["decisions"]) else 1), err


def test_it_is_said_in_the_text_and_on_the_page(run, tmp_path):
    page = tmp_path / "page.html"
    content = json.loads(CONFIGS[0].with_name("phi-4-FP8-dynamic.json").read_text())
    folder = folder_of(tmp_path, content | {"model_type": "unheard_of"})
    code, out, _ = run(folder, *SM_100, "--html", page)
    said = "unheard_of is not served by this engine"
    assert code == 0 and f"Note: {said}" in out and said in page.read_text()


def test_a_model_that_is_served_says_so(run):
    code, out, _ = run("Qwen3-8B-FP8", *SM_100, "--json")
    assert code == 0 and json.loads(out)["model"] == {"served": True, "notes": []}


def test_a_served_type_of_a_class_that_is_not_served_is_told_apart(run, tmp_path):
    content = TINY | {"model_type": "llama", "architectures": ["LlamaForSequenceClassification"]}
    code, out, _ = run(folder_of(tmp_path, content), *SM_100, "--json")
    model = json.loads(out)["model"]
    assert code == 0 and model["served"] is False
    assert model["notes"] == ["LlamaForSequenceClassification is not served by this engine"]


# ---------------------------------------------------------------- what no kernel here computes


def candidates(out: str, family: str) -> list[dict]:
    decisions = [d for d in json.loads(out)["decisions"] if d["problem"]["family"] == family]
    assert decisions and all(d["chosen"] is None for d in decisions)
    return [candidate for decision in decisions for candidate in decision["candidates"]]


def is_ruled_out(candidate) -> bool:
    """By the chip or the format, so that nothing more is said of it."""
    kinds = [reason["why"] for reason in candidate["reasons"]]
    return "format" in kinds or "device" in kinds


@pytest.mark.parametrize("device", ["sm_90", "cpu"])
def test_sparse_latent_attention_and_its_cache_have_no_kernel(run, device):
    named = next(str(file) for file in CONFIGS if file.stem == "DeepSeek-V3.2")
    code, out, err = run(named, "--device", device, "--libs", "all", "--json")
    assert code == 1 and "without a kernel" in err
    for family in ("attention", "kv_quant"):
        judged = [c for c in candidates(out, family) if not is_ruled_out(c)]
        assert judged
        for candidate in judged:
            texts = [reason["text"] for reason in candidate["reasons"]]
            assert any("computes plain attention, not sparse MLA" in text for text in texts)
    notes = json.loads(out)["model"]["notes"]
    assert "there is no kernel for attention with sparse MLA here" in notes


@pytest.mark.parametrize("model", ["DeepSeek-V3.1", "Kimi-K2-Instruct"])
@pytest.mark.parametrize(("device", "chosen"), [("sm_90", "triton"), ("cpu", "torch")])
def test_latent_attention_and_its_cache_have_kernels(run, model, device, chosen):
    named = next((str(file) for file in CONFIGS if file.stem == model), model)
    code, out, err = run(named, "--device", device, "--libs", "all", "--json")
    assert code == 0, err
    content = json.loads(out)
    assert content["model"] == {"served": True, "notes": []}
    found = [d for d in content["decisions"] if d["problem"]["family"] in ("attention", "kv_quant")]
    assert found and {d["chosen"] for d in found} == {chosen}
    layers = {layer for decision in content["decisions"] for layer in decision["layers"]}
    assert not [name for name in layers if "kv_b_proj" in name], "it is absorbed at load"


def test_experts_in_mxfp4_are_rejected_for_their_format_by_kernels_of_other_formats_alone(run):
    _, out, _ = run(CONFIGS[0].with_name("gpt-oss-120b.json"), *SM_100, "--json")
    (decision,) = [d for d in json.loads(out)["decisions"] if d["problem"]["family"] == "moe"]
    rejected = {
        candidate["backend"]
        for candidate in decision["candidates"]
        if any(reason["why"] == "format" for reason in candidate["reasons"])
    }
    assert "cutlass" in rejected and rejected.isdisjoint({"marlin", "torch", "cpu"})


def test_experts_without_a_gate_are_rejected_by_every_kernel_that_needs_one(run):
    name = "Nemotron-3-Super-120B-A12B-NVFP4.json"
    _, out, _ = run(CONFIGS[0].with_name(name), *SM_100, "--json")
    (decision,) = (d for d in json.loads(out)["decisions"] if d["problem"]["family"] == "moe")
    for candidate in decision["candidates"]:
        texts = [r["text"] for r in candidate["reasons"] if r["text"].startswith("computes ex")]
        if is_ruled_out(candidate) or candidate["backend"] in ("cpu", "torch", "triton"):
            assert not texts
            continue
        (text,) = texts
        assert text.removeprefix("computes experts with silu").endswith("not relu2 without a gate")
    model = json.loads(out)["model"]
    assert model["served"] is True and model["notes"] == []


def test_quantisation_that_is_not_read_leaves_its_layers_out_and_says_which(run, tmp_path):
    quantization = {"quant_method": "hqq", "bits": 4, "modules_to_not_convert": ["down_proj"]}
    content = TINY | {"model_type": "llama", "quantization_config": quantization}
    code, out, err = run(folder_of(tmp_path, content), *SM_100, "--json")
    model = json.loads(out)["model"]
    assert code == 1
    assert "3 layers are stored as hqq, and there is no kernel for them: " in err
    assert "quant_method 'hqq' is not supported; it takes fp8" in err
    assert model["served"] is False
    assert "model.layers.0.mlp.gate_up_proj" in model["notes"][0]
    layers = {layer for d in json.loads(out)["decisions"] for layer in d["layers"]}
    assert layers == {"model.layers.0.self_attn.attn", "model.layers.0.mlp.down_proj", "lm_head"}


@pytest.mark.parametrize(
    ("quantization", "why"),
    [
        ({"quant_method": "gptq", "bits": 3}, "GPTQ bits 3 is not supported: it takes 4, 8"),
        (
            {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"},
            "MIXED_PRECISION needs quantized_layers",
        ),
        ({"quant_method": "bitsandbytes"}, "take the model as it was before and quantise it with"),
    ],
)
def test_the_last_word_on_what_is_not_read_is_the_readers(run, tmp_path, quantization, why):
    content = TINY | {"model_type": "llama", "quantization_config": quantization}
    code, _, err = run(folder_of(tmp_path, content), *SM_100)
    assert code == 1 and why in err.splitlines()[-1]


def test_a_merged_layer_of_which_a_part_is_quantised_is_told_part_by_part(run, tmp_path):
    quantization = {"quant_method": "fp8", "modules_to_not_convert": ["v_proj"]}
    content = TINY | {"quantization_config": quantization}
    code, out, _ = run(folder_of(tmp_path, content), *SM_100, "--json")
    formats = {
        layer.rpartition(".")[2]: d["problem"].get("weight")
        for d in json.loads(out)["decisions"]
        for layer in d["layers"]
    }
    assert code == 0
    assert (formats["q_proj"], formats["v_proj"]) == ("fp8-tensor", "bf16")
    assert "qkv_proj" not in formats


def test_what_modelopt_says_beside_config_json_is_read(run, tmp_path):
    folder = folder_of(tmp_path, config("phi-4", quantization_config=None))
    quantization = {"quantization": {"quant_algo": "NVFP4", "exclude_modules": ["lm_head"]}}
    (folder / "hf_quant_config.json").write_text(json.dumps(quantization))
    _, out, _ = run(folder, *SM_100, "--json")
    assert {d["problem"].get("weight") for d in json.loads(out)["decisions"]} == {
        "nvfp4", "bf16", None
    }  # fmt: skip


# ---------------------------------------------------------------- folders with weights


def test_sizes_of_weights_in_a_folder_outrank_those_of_the_config(run, tmp_path):
    code, out, _ = run(folder_of(tmp_path, TINY, TENSORS), *SM_100, "--json")
    content = json.loads(out)
    assert code == 0
    assert "its layers are those of its safetensors headers" in content["model"]["notes"][0]
    sizes = {
        layer: (d["problem"]["n"], d["problem"]["k"])
        for d in content["decisions"]
        for layer in d["layers"]
        if d["problem"]["family"] == "linear"
    }
    assert sizes == {
        "model.layers.0.self_attn.qkv_proj": (128, 32),
        "model.layers.0.mlp.down_proj": (32, 112),
        "lm_head": (50, 32),
    }


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ((1 << 40).to_bytes(8, "little") + b"{}", "its header is said to have"),
        ((100).to_bytes(8, "little") + b"{}", "its header is said to have 100 bytes"),
        ((2).to_bytes(8, "little") + b"[]", "its header is no JSON object"),
        (
            (72).to_bytes(8, "little")
            + b'{"a.weight": {"dtype": "BF16", "shape": [8, 8], "data_offsets": [0,128]}}'[:72],
            "truncated or corrupt",
        ),
    ],
)
def test_a_damaged_header_is_refused_with_the_file(run, tmp_path, content, message):
    folder = folder_of(tmp_path, TINY)
    (folder / "model.safetensors").write_bytes(content)
    code, out, err = run(folder, *SM_100)
    assert code == 2 and out == "" and len(err.splitlines()) == 1
    assert "model.safetensors" in err and message in err


def test_a_size_that_no_weight_has_is_refused_by_name(run, tmp_path):
    name = "model.layers.0.mlp.up_proj.weight"
    code, _, err = run(folder_of(tmp_path, TINY, TENSORS | {name: ("BF16", [0, 32])}), *SM_100)
    assert code == 2 and f"{name} has the shape [0, 32]" in err


# ---------------------------------------------------------------- names on the hub


def explain_offline(home: Path, model: str) -> subprocess.CompletedProcess[str]:
    """With the cache of the hub in `home` and no network."""
    return explain_with({"HF_HOME": str(home), "HF_HUB_OFFLINE": "1"}, model)


def explain_with(variables: dict[str, str], model: str) -> subprocess.CompletedProcess[str]:
    command = "import sys; from vllm.entrypoints.cli.main import main; sys.exit(main(sys.argv[1:]))"
    words = ["kernels", "explain", model, *SM_100, "--json"]
    env = {k: v for k, v in environment().items() if not k.startswith("HF_")} | variables
    return subprocess.run(
        [sys.executable, "-c", command, *words], env=env, capture_output=True, text=True
    )


def cached(home: Path, content: dict, tensors: dict | None = None) -> Path:
    """The snapshot of `some-org/some-model` in the local cache of the hub."""
    own = home / "hub" / "models--some-org--some-model"
    (own / "refs").mkdir(parents=True)
    (own / "refs" / "main").write_text("0" * 40)
    return folder_of(own / "snapshots" / ("0" * 40), content, tensors)


def test_a_name_on_the_hub_without_a_network_says_what_is_lacking_and_how_to_get_it(tmp_path):
    done = explain_offline(tmp_path, "some-org/some-model")
    assert done.returncode == 2 and done.stdout == "" and len(done.stderr.splitlines()) == 1
    assert "config.json of 'some-org/some-model' cannot be fetched" in done.stderr
    assert "hf download some-org/some-model config.json" in done.stderr


def test_a_copy_in_the_local_cache_is_used_first(tmp_path):
    cached(tmp_path, TINY | {"quantization_config": {"quant_method": "fp8"}})
    done = explain_offline(tmp_path, "some-org/some-model")
    assert done.returncode == 0, done.stderr
    notes = json.loads(done.stdout)["model"]["notes"]
    assert "read from the usual fields of config.json" in notes[0]
    assert "*.safetensors of 'some-org/some-model' cannot be fetched" in notes[-1]


def test_weights_in_the_local_cache_are_read_and_a_file_that_may_exist_is_named(tmp_path):
    cached(tmp_path, TINY, TENSORS)
    done = explain_offline(tmp_path, "some-org/some-model")
    assert done.returncode == 0, done.stderr
    notes = json.loads(done.stdout)["model"]["notes"]
    assert "its layers are those of its safetensors headers" in notes[0]
    assert "hf_quant_config.json of 'some-org/some-model' cannot be fetched" in notes[-1]


class Hub(BaseHTTPRequestHandler):
    """Serves the files of one model as the hub does, with what `huggingface_hub` asks for."""

    folder: Path
    asked: list[str]

    def do_HEAD(self) -> None:
        self.answer(with_content=False)

    def do_GET(self) -> None:
        self.answer(with_content=True)

    def answer(self, with_content: bool) -> None:
        name = self.path.removeprefix("/some-org/some-model/resolve/main/")
        file = self.folder / name
        if not file.is_file():
            self.send_response(404)
            self.send_header("X-Error-Code", "EntryNotFound")
            self.send_header("X-Repo-Commit", "1" * 40)
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        content = file.read_bytes()
        if asked := re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", "")):
            content = content[int(asked[1]) : int(asked[2]) + 1]
        if with_content:
            self.asked.append(f"{name} {len(content)}")
        self.send_response(206 if asked else 200)
        self.send_header("X-Repo-Commit", "1" * 40)
        self.send_header("ETag", f'"{name}"')
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if with_content:
            self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def hub(tmp_path):
    """(folder of the one model it serves, environment for it, what was fetched with its size)."""
    handler = type("OneModel", (Hub,), {"folder": tmp_path / "served", "asked": []})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}"
    yield handler.folder, {"HF_ENDPOINT": url, "HF_HOME": str(tmp_path / "home")}, handler.asked
    server.shutdown()
    server.server_close()


def test_of_a_model_on_the_hub_config_and_headers_are_fetched_and_nothing_else(hub):
    folder, env, asked = hub
    folder_of(folder, TINY, TENSORS | {"big.weight": ("BF16", [1024, 1024])})
    done = explain_with(env, "some-org/some-model")
    assert done.returncode == 0, done.stderr
    note, *more = json.loads(done.stdout)["model"]["notes"]
    assert more == []
    assert "its layers are those of its safetensors headers" in note
    assert {name.split()[0] for name in asked} == {"config.json", "model.safetensors"}
    assert all(int(name.split()[1]) <= 100_001 for name in asked)


def test_a_model_of_a_served_architecture_needs_no_headers(hub):
    folder, env, asked = hub
    quantization = {"quantization": {"quant_algo": "FP8"}}
    folder_of(folder, TINY | {"model_type": "llama"}, TENSORS)
    (folder / "hf_quant_config.json").write_text(json.dumps(quantization))
    done = explain_with(env, "some-org/some-model")
    assert done.returncode == 0, done.stderr
    content = json.loads(done.stdout)
    assert content["model"] == {"served": True, "notes": []}
    assert "fp8-tensor" in {d["problem"].get("weight") for d in content["decisions"]}
    assert {name.split()[0] for name in asked} == {"config.json", "hf_quant_config.json"}


def test_a_model_on_the_hub_without_a_config_is_refused(hub):
    folder, env, _ = hub
    folder.mkdir()
    done = explain_with(env, "some-org/some-model")
    assert done.returncode == 2 and "on the Hugging Face hub has no config.json" in done.stderr


@pytest.mark.parametrize(
    "name", ["../x/y", "a/../b", "../x", "./x", "a/..", "a/b/c", ".a/b", "a b/c"]
)
def test_a_name_that_is_a_path_elsewhere_is_refused(run, name):
    code, out, err = run(name, *SM_100)
    assert code == 2 and out == ""
    assert f"model {name!r} is neither a folder or config.json here" in err


# ---------------------------------------------------------------- GPUs by name

NAMES = {
    "sm_70": ("V100", "Tesla V100-SXM2-32GB"),
    "sm_75": ("T4", "Tesla T4", "RTX 2080 Ti"),
    "sm_80": ("A100", "A800", "A30", "NVIDIA A100-SXM4-80GB"),
    "sm_86": ("A10", "A40", "RTX A6000", "RTX 3090", "rtx3060"),
    "sm_87": ("Jetson Orin", "orin"),
    "sm_89": ("L4", "L20", "L40", "L40S", "RTX 6000 Ada", "RTX 4090", "RTX 4070 Ti SUPER"),
    "sm_90": ("H20", "H100", "H200", "H800", "GH200", "NVIDIA H100 80GB HBM3"),
    "sm_100": ("B200", "GB200", "GB200 NVL72"),
    "sm_103": ("B300", "GB300"),
    "sm_110": ("Thor", "Jetson Thor", "Jetson AGX Thor"),
    "sm_120": ("RTX PRO 6000", "RTX PRO 6000 Blackwell Workstation Edition", "RTX 5090", "5080"),
    "sm_121": ("DGX Spark", "GB10", "spark"),
}


def test_every_chip_has_names_here():
    assert set(NAMES) == set(CHIPS)


@pytest.mark.parametrize(
    ("chip", "name"), [(chip, name) for chip, names in NAMES.items() for name in names]
)
def test_a_gpu_is_known_by_the_name_that_people_use(chip, name):
    assert device_of(name).arch == device_of(name.lower()).arch == chip


@pytest.mark.parametrize(
    ("wrong", "meant"),
    [
        ("gh20", "gh200"),
        ("rtx pro 600", "rtx pro 6000"),
        ("dgx sprak", "dgx spark"),
        ("spakr", "spark"),
        ("L40Z", "l40"),
        ("thr", "thor"),
        ("H100 PCIe", "h100"),
    ],
)
def test_a_misspelt_gpu_is_answered_with_the_nearest(run, wrong, meant):
    code, _, err = run("--layer", "bf16:64x64", "--device", wrong)
    assert code == 2 and f"did you mean {meant}?" in err
