"""The worked examples of CONTRIBUTING.md, built from its blocks and used."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from doc_pages import REPOSITORY, SHELL, Block, blocks, commands, sections
from entrypoints.tiny_model import write_tiny_llama
from following import calls, run_followed, walk
from safetensors.torch import load_file, save_file

PAGE = "CONTRIBUTING.md"
END = "-- end of the commands"


def blocks_of(title: str) -> list[Block]:
    (lines,) = (section.lines for section in sections(PAGE) if section.title == title)
    return [block for block in blocks(PAGE) if block.line in lines]


def install(section: str, folder: Path) -> tuple[Path, str]:
    """Writes the files of the section, installs its package apart, and returns where to, with the
    script that uses it."""
    script = ""
    for block in blocks_of(section):
        if file := re.fullmatch(r"`(\S+)`:", block.title):
            target = folder / file[1]
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(block.text)
        elif block.language == "python":
            script += block.text
    (package,) = folder.iterdir()
    installed = folder / "installed"
    done = subprocess.run(
        [sys.executable, "-m", "pip", "install", "--quiet", "--no-build-isolation", "--no-deps",
         "--no-index", "--disable-pip-version-check", "--target", str(installed), str(package)],
        capture_output=True,
        text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return installed, script


def checks(title: str) -> str:
    """Python code that checks the commands of a section."""
    texts = [one.text for b in blocks_of(title) if b.language in SHELL for one in commands(b)]
    assert texts
    return f"""
import sys
sys.path[:0] = {[str(REPOSITORY / "tests" / "docs"), str(REPOSITORY / "tests")]}
import pytest
from checking import check
from doc_pages import command
for text in {texts}:
    check(command("{PAGE}", text), pytest.MonkeyPatch(), lambda: None)
print({END!r})
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("tiny"))


def test_a_backend_of_another_package_serves_the_layers_that_ask_for_it(model, tmp_path):
    title = "Add a kernel backend"
    installed, script = install(title, tmp_path / "package")
    (tmp_path / "model").symlink_to(model)
    usual = re.sub(r"kernel=\[.*?\], dump_decisions=.*?\)", ")", script)
    assert usual.replace(", )", ")") != script
    names, folder = walk("A new backend"), tmp_path / "calls"
    code = checks(title) + script + usual
    printed = run_followed(code, folder, names, installed, cwd=tmp_path)
    assert calls(folder) == names

    with_example, without = printed.split(END + "\n")[1].splitlines()
    assert with_example == without
    decided = json.loads((tmp_path / "kernels.json").read_text())
    chosen = {layer: d["chosen"] for d in decided["decisions"] for layer in d["layers"]}
    down = {layer for layer in chosen if "down_proj" in layer}
    assert down and {layer for layer in chosen if chosen[layer] == "example"} == down


@pytest.mark.slow
def test_a_backend_of_a_file_serves_the_layers_that_ask_for_it(model, tmp_path):
    title, script = "Add a kernel in a file", ""
    for block in blocks_of(title):
        if block.title == "`mine.py`:":
            (tmp_path / "mine.py").write_text(block.text)
        elif block.language == "python":
            script += block.text
    (tmp_path / "model").symlink_to(model)
    usual = re.sub(r", kernel=\[.*?\], dump_decisions=.*?\)", ")", script)
    assert usual != script
    folder, variables = tmp_path / "calls", {"VLLM_CACHE_ROOT": str(tmp_path / "cache")}
    code = checks(title) + script + usual
    printed = run_followed(code, folder, (), cwd=tmp_path, **variables)
    with_mine, without = printed.split(END + "\n")[1].splitlines()
    assert with_mine == without
    decided = json.loads((tmp_path / "kernels.json").read_text())
    chosen = {layer: d["chosen"] for d in decided["decisions"] for layer in d["layers"]}
    down = {layer for layer in chosen if "down_proj" in layer}
    assert down and {layer for layer in chosen if chosen[layer] == "mine"} == down
    passed = json.loads((tmp_path / "cache" / "kernel_tables" / "passed_probes.json").read_text())
    assert any(" mine torch" in name for name in passed)


@pytest.mark.slow
def test_a_model_of_another_package_is_explained_and_served(model, tmp_path):
    """With a window longer than the text it writes what Llama does with the same weights; with a
    window of one key it does not."""
    title = "Add a model"
    installed, script = install(title, tmp_path / "package")
    config = json.loads((model / "config.json").read_text())
    config |= {"architectures": ["ExampleForCausalLM"], "model_type": "example"}
    config["num_blocks"] = config.pop("num_hidden_layers")
    for name, window in (("example", 256), ("narrow", 1)):
        shutil.copytree(model, tmp_path / name)
        text = json.dumps(config | {"sliding_window": window})
        (tmp_path / name / "config.json").write_text(text)

    folders = ("./example", "./narrow", str(model))
    code = checks(title) + "".join(script.replace("./example", folder) for folder in folders)
    printed = run_followed(code, tmp_path / "calls", (), installed, cwd=tmp_path)
    as_example, as_narrow, as_llama = printed.split(END + "\n")[1].splitlines()
    assert as_example == as_llama != as_narrow


def write_as_int8(model: Path, folder: Path) -> tuple[Path, Path]:
    """The model with linear layers in int8 and a scale per row, and the float32 model of the same
    values."""
    (file,) = model.glob("*.safetensors")
    quantised, same_values = folder / "int8-model", folder / "float-model"
    codes, floats = load_file(file), load_file(file)
    for name, weight in load_file(file).items():
        if not name.endswith("_proj.weight"):
            continue
        scale = weight.float().abs().amax(1, keepdim=True) / 127
        codes[name] = (weight.float() / scale).round().to(torch.int8)
        codes[name + "_scale"] = scale
        floats[name] = codes[name].float() * scale
    for target, tensors in ((quantised, codes), (same_values, floats)):
        shutil.copytree(model, target)
        save_file(tensors, target / file.name, {"format": "pt"})
    config = json.loads((model / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "example8"}
    (quantised / "config.json").write_text(json.dumps(config))
    return quantised, same_values


@pytest.mark.slow
def test_a_weight_format_of_another_package_is_explained_and_served(model, tmp_path):
    """The model in int8 writes what a float32 model of the same values writes."""
    title = "Add a weight format"
    installed, script = install(title, tmp_path / "package")
    quantised, same_values = write_as_int8(model, tmp_path)
    names = ("example_method:Method.shard_slots", "example_format:linear.apply")
    folder = tmp_path / "calls"
    code = checks(title) + script + script.replace(f"./{quantised.name}", str(same_values))
    printed = run_followed(code, folder, names, installed, cwd=tmp_path)
    assert calls(folder) == list(names)

    explained, used = printed.split(END + "\n")
    assert "example8" in explained
    chosen, in_int8, chosen_again, in_float = used.splitlines()
    assert chosen == chosen_again == "example8-channel example8"
    assert in_int8 == in_float
