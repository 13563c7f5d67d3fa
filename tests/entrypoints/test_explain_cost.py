"""How long `vllm kernels explain` takes."""

import json
import resource
import subprocess
import sys

import pytest
from slowness import slowness

from .serving import COMMAND, environment

LARGE = "model.layers.{0-93}"


def test_explaining_a_large_model_takes_half_a_second_and_no_torch(tmp_path):
    config = tmp_path / "config.json"
    config.write_text(json.dumps(_LARGE_MOE))
    code = (
        "import sys\nfrom vllm.entrypoints.cli.main import main\n"
        f"code = main(['kernels', 'explain', {str(config)!r}, '--device', 'sm_100', '--libs',"
        " 'all', '--tp', '8'])\n"
        "assert not {'torch', 'numpy', 'transformers'} & set(sys.modules)\nsys.exit(code)"
    )
    command = [sys.executable, "-c", code]
    assert min(seconds_of(command, environment(), LARGE) for _ in range(3)) <= 0.5 * slowness()


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("Qwen3.5-397B-A17B-NVFP4", ()),
        ("DeepSeek-V3.1", ()),
        ("DeepSeek-V3.1", ("--device", "h100")),
    ],
)
def test_explaining_the_largest_models_briefly_takes_150_milliseconds(tmp_path, model, words):
    """The start of the interpreter included, once modules are compiled."""
    variables = environment(PYTHONPYCACHEPREFIX=str(tmp_path))
    variables.pop("PYTHONDONTWRITEBYTECODE", None)
    command = [*COMMAND, "kernels", "explain", model, "--brief", *words]
    took = [seconds_of(command, variables, "decided by") for _ in range(9)]
    assert min(took[1:]) <= 0.15 * slowness()


def seconds_of(command: list[str], variables: dict[str, str], shown: str) -> float:
    """Of one core, whatever else the machine does."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(command, env=variables, capture_output=True, text=True)
    assert shown in done.stdout, done.stderr
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


_LARGE_MOE = {
    "model_type": "qwen3_moe",
    "torch_dtype": "bfloat16",
    "head_dim": 128,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "moe_intermediate_size": 1536,
    "num_attention_heads": 64,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 94,
    "num_key_value_heads": 8,
    "vocab_size": 151936,
    "quantization_config": {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
    },
}
