"""MXFP8: exponents, kernels that are chosen, activations as the format rounds them, and what we
write; FP8 blocks of as many columns."""

import json

import numpy as np
import pytest
import torch
from checkpoint_layouts import LAYOUTS, SHAPE, mxfp8, store
from safetensors.torch import load_file
from slow import quick
from test_qwen3_moe import (
    BLOCK_CONFIG,
    load,
    logprobs,
    quantised,
    records,
    reference_logprobs,
    write,
)
from weight_only_cases import make_linear, wide_of

from vllm.entrypoints.cli.main import main
from vllm.errors import CheckpointError
from vllm.formats.act_scheme import ActScheme
from vllm.formats.scales import Scales
from vllm.kernels.backends import emulation
from vllm.kernels.numerics import LinearCase
from vllm.model_executor.quantize import quantize_checkpoint
from vllm.ops.scale_rounding import requant_error, with_scales_of_type
from vllm.utils.fp8 import ue8m0_decode, ue8m0_encode


@pytest.fixture(scope="module")
def source(checkpoint):
    return checkpoint("qwen3", **SHAPE)


# ---------------------------------------------------------------- numbers


def test_every_exponent_is_its_power_of_two_and_back():
    exponents = torch.arange(256, dtype=torch.uint8)
    values = ue8m0_decode(exponents)
    assert values[:255].tolist() == [2.0 ** (e - 127) for e in range(255)]
    assert bool(values[255].isnan())
    assert torch.equal(ue8m0_encode(values[:255]), exponents[:255])


def test_groups_of_zeros_and_of_the_least_numbers_are_kept():
    weight = np.zeros((2, 64), np.float32)
    weight[0, 3], weight[1, 40] = 2.0**-130, 448 * 2.0**100
    codes, scales = LAYOUTS["ct-mxfp8"][0](weight + 0)[0].values()
    assert bool(codes.float().isfinite().all()) and scales[1, 1] == 127 + 100


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_kernels_that_round_scales_leave_exponents_alone(dtype):
    tensors, _ = make_linear("mxfp8", (48, 16), 128)
    assert with_scales_of_type(tensors, dtype) is tensors
    assert requant_error(tensors, Scales.ACTIVATION, dtype).is_exact


def test_a_scale_may_be_stored_as_the_type_of_its_own(source, tmp_path):
    weights = store(source, tmp_path, *LAYOUTS["ct-mxfp8"])
    tensors = load_file(tmp_path / "model.safetensors")
    typed = {
        name: t.view(torch.float8_e8m0fnu) if name.endswith("weight_scale") else t
        for name, t in tensors.items()
    }
    write(tmp_path, tmp_path / "typed", typed)
    assert len(weights) == 14 and torch.equal(logprobs(tmp_path / "typed"), logprobs(tmp_path))


# ---------------------------------------------------------------- kernels


@pytest.mark.parametrize(
    ("device", "chosen"),
    [("cpu", "cpu"), ("sm_80", "marlin"), ("sm_90", "marlin"), ("sm_100", "scaled_mm"),
     ("sm_120", "marlin")],
)  # fmt: skip
def test_explain_tells_its_kernel(source, tmp_path, capsys, device, chosen):
    store(source, tmp_path, *LAYOUTS["modelopt-mxfp8"])
    flags = ["--device", device, "--libs", "all", "--dtype", "bf16", "--json"]
    assert main(["kernels", "explain", str(tmp_path), *flags]) == 0
    decisions = json.loads(capsys.readouterr().out)["decisions"]
    found = {d["chosen"] for d in decisions if d["problem"].get("weight") == "mxfp8"}
    assert found == {chosen}


def test_activations_are_rounded_as_the_format_says_where_a_chip_does(source, tmp_path):
    """As torch's GEMM on sm_100 has them, emulated; others multiply them as they are."""
    store(source, tmp_path, *LAYOUTS["ct-mxfp8"])
    decisions = dict(records(load(tmp_path, linear_backend="emulate:sm_100"), "linear"))
    decision = decisions["model.layers.1.mlp.down_proj"]
    assert decision.winner.act is ActScheme.MXFP8_GROUP32
    case = LinearCase.of(decision.problem, decision.winner, torch.device("cpu"), 40)
    x = case.x[:40]
    wanted = torch.from_numpy(mxfp8(x.float().numpy())[1]) @ wide_of(case.tensors).T
    kernel = emulation.linear(decision.problem, case.tensors, decision.winner)
    assert torch.equal(kernel(x), wanted.to(x.dtype))
    assert not torch.equal(kernel(x), (x.float() @ wide_of(case.tensors).T).to(x.dtype))


# ---------------------------------------------------------------- what we write


@pytest.mark.parametrize("model", ["qwen3", "qwen3_moe"])
def test_what_we_write_has_the_layout_of_the_library_and_reads_back(checkpoint, tmp_path, model):
    shape = SHAPE | {"moe_intermediate_size": 64} if model == "qwen3_moe" else SHAPE
    source = checkpoint(model, **shape)
    command = ["quantize", str(source), str(tmp_path / "out"), "--format", "mxfp8"]
    assert main(command) == 0
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    group = config["config_groups"]["group_0"]
    assert config["format"] == "mxfp8-quantized"
    for field in ("weights", "input_activations"):
        wanted = {"num_bits": 8, "type": "float", "strategy": "group", "group_size": 32}
        assert wanted.items() <= group[field].items()
        assert group[field]["scale_dtype"] == "torch.uint8"
    tensors, plain = load_file(tmp_path / "out" / "model.safetensors"), {}
    for name, weight in load_file(source / "model.safetensors").items():
        plain[name] = weight
        if name + "_scale" in tensors:
            built, wanted = mxfp8(weight.numpy())
            assert torch.equal(tensors[name + "_scale"], built["weight_scale"])
            assert torch.equal(tensors[name].float(), built["weight"].float())
            plain[name] = torch.from_numpy(wanted)
    wide = write(source, tmp_path / "wide", plain)
    assert (logprobs(tmp_path / "out") - reference_logprobs(wide)).abs().max() < 1e-4


def test_a_weight_of_no_whole_groups_is_not_written(checkpoint, tmp_path):
    source = checkpoint("llama", **SHAPE | {"intermediate_size": 144})
    with pytest.raises(CheckpointError, match="144 columns, which are not whole groups of 32"):
        quantize_checkpoint(source, tmp_path / "out", "mxfp8")
    assert not (tmp_path / "out").exists()


# ---------------------------------------------------------------- FP8 blocks of 32 columns


@pytest.mark.parametrize("ranks", quick([1, 2], [1]))
@pytest.mark.parametrize("model", ["qwen3", "qwen3_moe"])
def test_fp8_blocks_of_32x32_have_the_logits_of_their_weights(checkpoint, tmp_path, model, ranks):
    shape = SHAPE | {"moe_intermediate_size": 80} if model == "qwen3_moe" else SHAPE
    source = checkpoint(model, **shape)
    stored, wide = quantised(load_file(source / "model.safetensors"), block=(32, 32))
    config = BLOCK_CONFIG | {"weight_block_size": [32, 32]}
    folder = write(source, tmp_path / "blocks", stored, quantization_config=config)
    wanted = reference_logprobs(write(source, tmp_path / "wide", wide))
    assert (logprobs(folder, tensor_parallel_size=ranks) - wanted).abs().max() < 1e-4


@pytest.mark.parametrize(("device", "chosen"), [("cpu", "cpu"), ("sm_90", "triton")])
def test_fp8_blocks_of_32x32_have_a_kernel_of_any_block(source, capsys, device, chosen):
    flags = ["--device", device, "--libs", "none", "--dtype", "bf16", "--json"]
    assert main(["kernels", "explain", "--layer", "fp8-block[32x32]:4096x4096", *flags]) == 0
    (decision,) = json.loads(capsys.readouterr().out)["decisions"]
    assert decision["chosen"] == chosen
