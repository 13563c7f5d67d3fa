"""Checkpoints that compressed-tensors itself made give the logits of what it reads in them."""

import json

import pytest
import torch
from checkpoint_layouts import is_projection
from safetensors.torch import load_file, save_file
from slow import quick
from test_other_formats import widened
from test_qwen3_moe import load, logprobs, records, reference_logprobs, write

pytest.importorskip("compressed_tensors")

from compressed_tensors.compressors.base import BaseCompressor
from compressed_tensors.quantization import (
    QuantizationConfig,
    QuantizationScheme,
    preset_name_to_scheme,
)
from compressed_tensors.quantization.utils import (
    calculate_qparams,
    generate_gparam,
)

MX, MX4 = "mxfp8-quantized", "mxfp4-pack-quantized"
FLOAT, PACKED, FP4 = "float-quantized", "pack-quantized", "nvfp4-pack-quantized"
# The tool's name of a scheme -> (format of the files, our name of the weights).
SCHEMES = {
    "FP8_DYNAMIC": (FLOAT, "fp8-channel"),
    "FP8": (FLOAT, "fp8-tensor"),
    "FP8_BLOCK": (FLOAT, "fp8-block[128x128]"),
    "MXFP8": (MX, "mxfp8"),
    "MXFP8A16": (MX, "mxfp8"),
    "MXFP4": (MX4, "mxfp4"),
    "MXFP4A16": (MX4, "mxfp4"),
    "MXFP4XFP8": (MX4, "mxfp4"),
    "NVFP4A16": (FP4, "nvfp4"),
    "NVFP4": (FP4, "nvfp4"),
    "W4A16": (PACKED, "int4-group[128]"),
    "W4A16_ASYM": (PACKED, "int4-group[128]"),
    "W4AFP8": (PACKED, "int4-group[128]"),
}
SHAPE = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "moe_intermediate_size": 256,
    "num_attention_heads": 8,
    "num_hidden_layers": 2,
}
IGNORED = ["lm_head", "re:.*mlp.gate$"]


def extremes(weight, args):
    """Least and greatest value of what shares a scale."""
    strategy = str(getattr(args.strategy, "value", args.strategy))
    if strategy == "tensor":
        return weight.min().view(1), weight.max().view(1)
    if strategy == "channel":
        return weight.amin(1, keepdim=True), weight.amax(1, keepdim=True)
    if strategy == "block":
        rows, columns = args.block_structure
        padded = torch.nn.functional.pad(
            weight, (0, -weight.shape[1] % columns, 0, -weight.shape[0] % rows)
        )
        blocks = padded.unflatten(0, (-1, rows)).unflatten(2, (-1, columns))
        return blocks.amin((1, 3)), blocks.amax((1, 3))
    groups = weight.unflatten(1, (-1, args.group_size))
    return groups.amin(-1), groups.amax(-1)


def compressed(weight, scheme, stored):
    """(tensors of a layer, the weight that the tool reads in them)."""
    args, state = scheme.weights, {"weight": weight}
    if stored == FP4:
        state["weight_global_scale"] = generate_gparam(weight.min(), weight.max()).view(1)
    scale, zero = calculate_qparams(
        *extremes(weight, args), args, global_scale=state.get("weight_global_scale")
    )
    state |= {"weight_scale": scale, "weight_zero_point": zero}
    inputs = scheme.input_activations
    if inputs is not None and stored == FP4:
        state["input_global_scale"] = torch.tensor([100.0])
    elif inputs is not None and not inputs.dynamic:
        state["input_scale"] = torch.tensor([0.02])
    tool = BaseCompressor.get_value_from_registry(stored)
    result = tool.compress(state, scheme)
    theirs = tool.decompress(result, scheme)["weight"].float()
    if stored != FP4:
        return result, theirs
    # It widens NVFP4 to bfloat16 only.
    (exact,) = widened({f"x.{part}": tensor for part, tensor in result.items()}).values()
    assert ((theirs - exact).abs() <= exact.abs() * 2**-7).all()
    return result, exact


@pytest.mark.parametrize("model", quick(["llama", "qwen3_moe"], ["llama"]))
@pytest.mark.parametrize("name", SCHEMES)
def test_its_checkpoint_has_the_logits_of_what_it_decompresses(checkpoint, tmp_path, name, model):
    stored, weight_format = SCHEMES[name]
    source = checkpoint(model, **SHAPE)
    scheme = QuantizationScheme(**preset_name_to_scheme(name, ["Linear"]).model_dump())
    tensors = load_file(source / "model.safetensors")
    kept, wide = {}, dict(tensors)
    for key, weight in tensors.items():
        if is_projection(key):
            pieces, wide[key] = compressed(weight, scheme, stored)
            kept |= {key.removesuffix("weight") + part: t for part, t in pieces.items()}
        else:
            kept[key] = weight
    config = QuantizationConfig(
        config_groups={"group_0": scheme},
        ignore=IGNORED,
        format=stored,
        quantization_status="compressed",
    )
    folder = write(
        source, tmp_path / "model", {}, quantization_config=json.loads(config.model_dump_json())
    )
    save_file({key: t.contiguous() for key, t in kept.items()}, folder / "model.safetensors")
    llm = load(folder)
    family = "moe" if model == "qwen3_moe" else "linear"
    found = {str(d.problem.weight) for key, d in records(llm, family) if "mlp." in key}
    merged = {"fp8-tensor": {"fp8-tensor", "fp8-channel"}}.get(weight_format, {weight_format})
    assert found - {"fp32"} <= merged
    wanted = reference_logprobs(write(source, tmp_path / "wide", wide))
    assert (logprobs(folder) - wanted).abs().max() < 1e-4
    assert (wanted - reference_logprobs(source)).abs().max() > 1e-3
