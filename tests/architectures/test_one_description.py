"""An architecture is known to its own file alone, and a package outside the tree can add one."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from vllm.architectures.architecture import Architecture
from vllm.architectures.registry import _BUILT_IN, known
from vllm.model_executor.models.decoder import _FEED_FORWARDS

ROOT = Path(__file__).resolve().parents[2]
# How answers are written, by names that are those of the first models which did so.
FORMATS_OF_ANSWERS = ("vllm/tool_parsers/", "vllm/reasoning/")


def names_of(module: str) -> set[str]:
    """model_type and classes of every architecture of a built-in file."""
    source = (ROOT / "vllm/architectures" / f"{module}.py").read_text()
    own = [one for one in known().values() if f'"{one.model_type}"' in source]
    return {name for one in own for name in (one.model_type, *one.hf_architectures)}


@pytest.mark.parametrize("module", _BUILT_IN)
def test_no_other_file_names_an_architecture(module):
    names = names_of(module)
    assert names
    quoted = re.compile("|".join(rf"""["']{re.escape(name)}["']""" for name in names))
    exempt = {f"vllm/architectures/{module}.py", "vllm/architectures/registry.py"}
    files = {path.relative_to(ROOT).as_posix(): path for path in (ROOT / "vllm").rglob("*.py")}
    found = [name for name, path in files.items()
             if name not in exempt and not name.startswith(FORMATS_OF_ANSWERS)
             and quoted.search(path.read_text())]  # fmt: skip
    assert found == []


def test_the_engine_has_a_layer_for_everything_that_served_architectures_are_made_of(checkpoint):
    assert {type(one) for one in known().values()} >= {Architecture}
    for name in ("llama", "qwen3_moe", "qwen3_5_moe"):
        raw = json.loads((checkpoint(name) / "config.json").read_text())
        decoder = known()[raw["model_type"]].decoder(raw)
        assert {type(layer.feed_forward) for layer in decoder.layers} <= _FEED_FORWARDS.keys()


# A variation: Llama with normalised queries and keys, and a window in every second layer.
VARIATION = """
from vllm.architectures.architecture import Architecture
from vllm.architectures.build import AttentionKind, attention, decoder, gated_mlp
from vllm.architectures.llama import DEFAULTS


def describe(fields):
    return decoder(fields, mixer, gated_mlp)


def mixer(fields, layer):
    window = fields.size("every_second_window") if layer % 2 else 0
    return attention(fields, AttentionKind(window=window, qk_norm="rms"))


ADDED = Architecture(
    "half_windowed",
    ("HalfWindowedForCausalLM",),
    describe,
    DEFAULTS
    | {
        "intermediate_size": 112,
        "num_key_value_heads": None,
        "max_position_embeddings": 512,
        "every_second_window": 16,
    },
    nullable=frozenset({"head_dim", "num_key_value_heads"}),
    renamed_tensors=(("stack.", "model."),),
)
"""
SERVE = """
import sys
from vllm import LLM, SamplingParams

llm = LLM(sys.argv[1], skip_tokenizer_init=True, max_num_seqs=2)
params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
(output,) = llm.generate([{"prompt_token_ids": list(range(3, 50))}], params, use_tqdm=False)
windows = {d.problem.sliding_window for _, d in llm.llm_engine.core.selection.records
           if d.problem.family == "attention"}
assert windows == {0, 16}, windows
assert len(output.outputs[0].token_ids) == 6
"""


@pytest.fixture
def package(tmp_path):
    """Folder of a package that adds the variation through the entry point."""
    assert VARIATION.count("\n") < 40
    (tmp_path / "half_windowed.py").write_text(VARIATION)
    info = tmp_path / "half_windowed-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Name: half-windowed\nVersion: 1.0\n")
    entry = "[vllm.architectures]\nhalf_windowed = half_windowed:ADDED\n"
    (info / "entry_points.txt").write_text(entry)
    return tmp_path


@pytest.fixture
def variation(checkpoint, tmp_path):
    """Its checkpoint: Qwen3's tensors under names of its own."""
    from safetensors.torch import load_file, save_file

    source, folder = checkpoint("qwen3"), tmp_path / "checkpoint"
    folder.mkdir()
    tensors = load_file(source / "model.safetensors")
    stored = {re.sub("^model", "stack", name): tensor for name, tensor in tensors.items()}
    save_file(stored, folder / "model.safetensors")
    config = json.loads((source / "config.json").read_text())
    config |= {"model_type": "half_windowed", "architectures": ["HalfWindowedForCausalLM"]}
    for name in ("layer_types", "sliding_window", "use_sliding_window", "max_window_layers"):
        config.pop(name, None)
    (folder / "config.json").write_text(json.dumps(config | {"every_second_window": 16}))
    return folder


def run(package: Path, *arguments: str) -> str:
    path = os.pathsep.join((str(package), str(ROOT)))
    found = subprocess.run(
        [sys.executable, *arguments],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    assert found.returncode == 0, found.stderr
    return found.stdout


def test_a_variation_of_another_package_is_explained_and_served(package, variation):
    command = ("-m", "vllm.entrypoints.cli.main", "kernels", "explain", str(variation), "--json",
               "--device", "sm_90")  # fmt: skip
    listed = run(package, *command)
    assert "self_attn.qkv_proj" in listed
    run(package, "-c", SERVE, str(variation))
