"""Checkpoints in the formats of other tools, each built by hand in numpy beside the float32 weights
that it stands for."""

import json

import numpy as np
import torch
from safetensors.torch import load_file, save_file

# Two groups of 128 in some weights, one in others; K and V have few rows.
SHAPE = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
}
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
E2M1 = np.concatenate([E2M1, -E2M1])
AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]
CT = {"quant_method": "compressed-tensors", "quantization_status": "compressed"}


def e4m3(x: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(x, np.float32)).to(torch.float8_e4m3fn)


def as_float(x: torch.Tensor) -> np.ndarray:
    return x.float().numpy()


def ints(codes: np.ndarray) -> torch.Tensor:
    """Eight codes of 0 to 15 along the last axis in each int32, the first in the lowest bits."""
    words = codes.astype(np.uint32).reshape(*codes.shape[:-1], -1, 8)
    packed = sum(words[..., i] << np.uint32(4 * i) for i in range(8))
    return torch.from_numpy(np.ascontiguousarray(packed).view(np.int32))


def fp4(weight: np.ndarray):
    """(bytes, scales, global factor, float32 weight) of an NVFP4 weight."""
    factor = np.float32(np.abs(weight).max() / (448 * 6))
    groups = weight.reshape(len(weight), -1, 16)
    scales = e4m3(np.abs(groups).max(-1) / 6 / factor)
    step = as_float(scales)[..., None] * factor
    codes = np.abs(groups[..., None] / step[..., None] - E2M1).argmin(-1).astype(np.uint8)
    wanted = (E2M1[codes] * step).reshape(weight.shape)
    codes = codes.reshape(weight.shape)
    return torch.from_numpy(codes[:, 0::2] | codes[:, 1::2] << 4), scales, factor, wanted


def modelopt_nvfp4(weight):
    packed, scales, factor, wanted = fp4(weight)
    return {
        "weight": packed,
        "weight_scale": scales,
        "weight_scale_2": torch.tensor(factor),
        "input_scale": torch.tensor(0.01),
    }, wanted


def ct_nvfp4(weight):
    packed, scales, factor, wanted = fp4(weight)
    return {
        "weight_packed": packed,
        "weight_scale": scales,
        "weight_global_scale": torch.tensor([1 / factor]),
        "input_global_scale": torch.tensor([100.0]),
    }, wanted


def ct_nvfp4a16(weight):
    stored, wanted = ct_nvfp4(weight)
    del stored["input_global_scale"]
    return stored, wanted


def fp8(weight, scale, wide, **more):
    """`scale` as it is stored, `wide` as it multiplies."""
    quantised = e4m3(weight / wide)
    scale = torch.from_numpy(np.asarray(scale, np.float32))
    return {"weight": quantised, "weight_scale": scale, **more}, as_float(quantised) * wide


def fp8_tensor(weight, shape=()):
    scale = np.float32(np.abs(weight).max() / 448)
    return fp8(weight, np.full(shape, scale), scale)


def modelopt_fp8(weight):
    stored, wanted = fp8_tensor(weight)
    return stored | {"input_scale": torch.tensor(0.02)}, wanted


def ct_fp8_tensor(weight):
    stored, wanted = fp8_tensor(weight, (1,))
    return stored | {"input_scale": torch.tensor([0.02])}, wanted


def ct_fp8_channel(weight):
    scales = np.abs(weight).max(1, keepdims=True) / np.float32(448)
    return fp8(weight, scales, scales)


def int8_channel(weight, dtype):
    """(codes int8, scales [N, 1], float32 weight)."""
    scales = torch.from_numpy(np.abs(weight).max(1, keepdims=True) / np.float32(127)).to(dtype)
    step = as_float(scales)
    codes = np.rint(weight / step).clip(-128, 127).astype(np.int8)
    return torch.from_numpy(codes), scales, codes * step


def ct_int8(dtype=torch.bfloat16, **more):
    def build(weight):
        codes, scales, wanted = int8_channel(weight, dtype)
        own = {name: tensor.clone() for name, tensor in more.items()}
        return {"weight": codes, "weight_scale": scales} | own, wanted

    return build


def ct_fp8_block(weight):
    rows, columns = (np.arange(size) // 128 for size in weight.shape)
    scales = np.array(
        [
            [
                np.abs(weight[rows == i][:, columns == j]).max() / np.float32(448)
                for j in range(columns[-1] + 1)
            ]
            for i in range(rows[-1] + 1)
        ],
        np.float32,
    )
    return fp8(weight, scales, scales[rows][:, columns])


def modelopt_fp8_block(weight):
    """Scales as ModelOpt keeps them, [rows, 1, columns, 1]."""
    stored, wanted = ct_fp8_block(weight)
    stored["weight_scale"] = stored["weight_scale"][:, None, :, None]
    return stored, wanted


def mxfp8(weight):
    """E4M3 and exponents: the least power of two with which the group's largest is at most 448."""
    groups = weight.reshape(len(weight), -1, 32)
    exponents = np.ceil(np.log2(np.abs(groups).max(-1) / 448)).clip(-127, 127)
    step = np.exp2(exponents).astype(np.float32)[..., None]
    codes = e4m3(groups / step)
    stored = {
        "weight": codes.reshape(weight.shape),
        "weight_scale": torch.from_numpy((exponents + 127).astype(np.uint8)),
    }
    return stored, (as_float(codes) * step).reshape(weight.shape)


def mxfp4(weight):
    """(bytes, exponents, float32 weight): E2M1 and the OCP specification's exponents, with which
    the group's largest magnitude is from 4 to below 8."""
    groups = weight.reshape(len(weight), -1, 32)
    largest = np.abs(groups).max(-1)
    exponents = (np.floor(np.log2(largest)) - 2).clip(-127, 127)
    step = np.exp2(exponents).astype(np.float32)[..., None]
    codes = np.abs(groups[..., None] / step[..., None] - E2M1).argmin(-1).astype(np.uint8)
    wanted = (E2M1[codes] * step).reshape(weight.shape)
    codes = codes.reshape(weight.shape)
    packed = torch.from_numpy(codes[:, 0::2] | codes[:, 1::2] << 4)
    return packed, torch.from_numpy((exponents + 127).astype(np.uint8)), wanted


def ct_mxfp4(weight):
    packed, scales, wanted = mxfp4(weight)
    return {"weight_packed": packed, "weight_scale": scales}, wanted


def plain_mxfp4(weight):
    packed, scales, wanted = mxfp4(weight)
    return {"weight": packed, "weight_scale": scales}, wanted


def int4(weight, group, dtype, is_symmetric):
    """(codes, zero points, scales, float32 weight), codes and zero points of 0 to 15."""
    groups = weight.reshape(len(weight), -1, group)
    low, high = groups.min(-1).clip(max=0), groups.max(-1).clip(min=0)
    span = 2 * np.maximum(-low, high) if is_symmetric else high - low
    scales = torch.from_numpy(span / np.float32(15)).to(dtype)
    step = as_float(scales)
    zeros = np.full_like(step, 8) if is_symmetric else np.rint(-low / step).clip(0, 15)
    codes = (np.rint(groups / step[..., None]) + zeros[..., None]).clip(0, 15)
    wanted = ((codes - zeros[..., None]) * step[..., None]).reshape(weight.shape)
    return codes.reshape(weight.shape), zeros, scales, wanted


def ct_int4(group, dtype=torch.bfloat16, is_symmetric=True):
    def build(weight):
        codes, zeros, scales, wanted = int4(weight, group, dtype, is_symmetric)
        stored = {"weight_packed": ints(codes), "weight_scale": scales}
        stored["weight_shape"] = torch.tensor(weight.shape)
        if not is_symmetric:
            stored["weight_zero_point"] = ints(zeros.T).T.contiguous()
        return stored, wanted

    return build


def awq(group):
    def build(weight):
        codes, zeros, scales, wanted = int4(weight, group, torch.float16, is_symmetric=False)

        def shuffled(values):
            eights = values.T.reshape(values.shape[1], -1, 8)
            return ints(eights[..., AWQ_ORDER].reshape(values.shape[1], -1))

        stored = {"qweight": shuffled(codes), "qzeros": shuffled(zeros)}
        return stored | {"scales": scales.T.contiguous()}, wanted

    return build


def gptq_codes(weight, bits, group, sym):
    """(codes, zero points, scales, float32 weight) with codes and zero points of `bits` bits, and
    zero points of 0 and of the greatest code among them."""
    top, groups = 2**bits - 1, weight.reshape(len(weight), -1, group)
    low, high = groups.min(-1).clip(max=0), groups.max(-1).clip(min=0)
    span = 2 * np.maximum(-low, high) if sym else high - low
    scales = torch.from_numpy(span / np.float32(top)).to(torch.float16)
    step = as_float(scales)
    zeros = np.full_like(step, 2 ** (bits - 1)) if sym else np.rint(-low / step).clip(0, top)
    if not sym:
        zeros[0, 0], zeros[3, 0] = 0, top
    codes = (np.rint(groups / step[..., None]) + zeros[..., None]).clip(0, top)
    wanted = ((codes - zeros[..., None]) * step[..., None]).reshape(weight.shape)
    return codes.reshape(weight.shape), zeros, scales, wanted.astype(np.float32)


def gptq_ints(codes, bits):
    """Codes along the last axis in int32, the first in the lowest bits."""
    words = codes.astype(np.uint32).reshape(*codes.shape[:-1], -1, 32 // bits)
    packed = sum(words[..., i] << np.uint32(bits * i) for i in range(32 // bits))
    return torch.from_numpy(np.ascontiguousarray(packed).view(np.int32))


def gptq(bits=4, group=128, sym=True, is_v2=False, order=None):
    """order: of the columns of a weight [N, K], for weights in activation order."""

    def build(weight):
        size = weight.shape[1] if group == -1 else group
        columns = np.arange(weight.shape[1]) if order is None else order(weight.shape[1])
        codes, zeros, scales, sorted_weight = gptq_codes(weight[:, columns], bits, size, sym)
        back = np.argsort(columns)
        qzeros = gptq_ints(zeros.T, bits)
        if not is_v2:
            qzeros = qzeros - {4: 0x11111111, 8: 0x01010101}[bits]
        return {
            "qweight": gptq_ints(codes[:, back], bits).T.contiguous(),
            "qzeros": qzeros,
            "scales": scales.T.contiguous(),
            "g_idx": torch.from_numpy((np.arange(weight.shape[1]) // size)[back].astype(np.int32)),
        }, np.ascontiguousarray(sorted_weight[:, back])

    return build


def gptq_config(**fields):
    return {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False} | fields


def groups_of(stored, weights, inputs=None):
    return CT | {
        "format": stored,
        "ignore": ["lm_head"],
        "config_groups": {
            "group_0": {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
        },
    }


def args(num_bits, kind, strategy, **more):
    return {"num_bits": num_bits, "type": kind, "strategy": strategy, "symmetric": True} | more


FP4 = args(4, "float", "tensor_group", group_size=16, dynamic=False)
FP8 = args(8, "float", "tensor", dynamic=False)
TOKEN = args(8, "float", "token", dynamic=True)
GROUP = args(8, "float", "group", group_size=128, dynamic=True)
INT8 = args(8, "int", "channel", dynamic=False)
INT8_TOKEN = args(8, "int", "token", dynamic=True)
MX = args(8, "float", "group", group_size=32, scale_dtype="torch.uint8", dynamic=False)
MXFP4 = MX | {"num_bits": 4}
QUARK = {"dtype": "fp4", "qscheme": "per_group", "group_size": 32, "scale_format": "e8m0"}
QUARK |= {"is_dynamic": False, "symmetric": None}
FLOAT, PACKED, INT = "float-quantized", "pack-quantized", "int-quantized"

# Name -> (how a weight is stored, quantization_config).
LAYOUTS = {
    "modelopt-nvfp4": (
        modelopt_nvfp4,
        {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]},
    ),
    "modelopt-fp8": (modelopt_fp8, {"quant_method": "modelopt", "quant_algo": "FP8"}),
    "modelopt-fp8-block": (
        modelopt_fp8_block,
        {"quant_method": "modelopt", "quant_algo": "FP8_PB_WO"},
    ),
    "ct-nvfp4": (
        ct_nvfp4,
        groups_of("nvfp4-pack-quantized", FP4, FP4 | {"dynamic": "local"}),
    ),
    "ct-nvfp4a16": (ct_nvfp4a16, groups_of("nvfp4-pack-quantized", FP4)),
    "ct-fp8-tensor": (ct_fp8_tensor, groups_of(FLOAT, FP8, FP8)),
    "ct-fp8-channel": (ct_fp8_channel, groups_of(FLOAT, FP8 | {"strategy": "channel"}, TOKEN)),
    "ct-fp8-block": (
        ct_fp8_block,
        groups_of(FLOAT, FP8 | {"strategy": "block", "block_structure": [128, 128]}, GROUP),
    ),
    "ct-int8": (ct_int8(), groups_of(INT, INT8, INT8_TOKEN)),
    "ct-int8-static": (
        ct_int8(torch.float32, input_scale=torch.tensor([0.03])),
        groups_of(INT, INT8, args(8, "int", "tensor", dynamic=False)),
    ),
    "ct-int8-w8a16": (ct_int8(torch.float16), groups_of(INT, INT8)),
    "ct-mxfp8": (mxfp8, groups_of("mxfp8-quantized", MX, MX | {"dynamic": True})),
    "ct-mxfp8a16": (mxfp8, groups_of("mxfp8-quantized", MX)),
    "modelopt-mxfp8": (
        mxfp8,
        {"quant_method": "modelopt", "quant_algo": "MXFP8", "ignore": ["lm_head"]},
    ),
    "ct-mxfp4": (ct_mxfp4, groups_of("mxfp4-pack-quantized", MXFP4, MXFP4 | {"dynamic": True})),
    "modelopt-mxfp4": (
        plain_mxfp4,
        {"quant_method": "modelopt", "quant_algo": "MXFP4", "ignore": ["lm_head"]},
    ),
    "quark-mxfp4": (
        plain_mxfp4,
        {
            "quant_method": "quark",
            "global_quant_config": {"weight": QUARK, "input_tensors": QUARK | {"is_dynamic": True}},
            "exclude": ["lm_head"],
            "export": {"weight_format": "real_quantized", "pack_method": "reorder"},
            "layer_quant_config": {},
        },
    ),
    "ct-mxfp4a16": (ct_mxfp4, groups_of("mxfp4-pack-quantized", MXFP4)),
    "ct-int4-128": (
        ct_int4(128),
        groups_of(PACKED, args(4, "int", "group", group_size=128)),
    ),
    "ct-int4-w4a8": (
        ct_int4(128),
        groups_of(PACKED, args(4, "int", "group", group_size=128), TOKEN),
    ),
    "ct-int4-64-fp16": (
        ct_int4(64, torch.float16),
        groups_of(PACKED, args(4, "int", "group", group_size=64, actorder="static")),
    ),
    "ct-int4-32-zeros": (
        ct_int4(32, torch.float32, is_symmetric=False),
        groups_of(PACKED, args(4, "int", "group", group_size=32, symmetric=False)),
    ),
    "awq-128": (
        awq(128),
        {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True},
    ),
    "awq-32": (
        awq(32),
        {"quant_method": "awq", "w_bit": 4, "q_group_size": 32, "version": "GEMM"},
    ),
    "gptq-128": (gptq(), gptq_config(sym=True, lm_head=False, checkpoint_format="gptq")),
    "gptq-32-zeros": (gptq(group=32, sym=False), gptq_config(group_size=32, sym=False)),
    "gptq-channel": (gptq(group=-1), gptq_config(group_size=-1, desc_act=True)),
    "gptq8-64-zeros-v2": (
        gptq(8, 64, sym=False, is_v2=True),
        gptq_config(bits=8, group_size=64, sym=False, checkpoint_format="gptq_v2"),
    ),
    "gptq8-channel-zeros": (
        gptq(8, -1, sym=False),
        gptq_config(bits=8, group_size=-1, sym=False),
    ),
}


def is_projection(name):
    return name.endswith("_proj.weight")


def is_expert(name):
    return is_projection(name) and ".experts." in name


def store(source, folder, build, quantization_config, picks=is_projection):
    """Writes the model of `source` with the weights that `picks` names as `build` stores them;
    returns the float32 weights that a reference is to have."""
    return store_each(
        source, folder, lambda name: build if picks(name) else None, quantization_config
    )


def store_each(source, folder, build_of, quantization_config):
    """The same, each weight as `build_of` its name stores it; None keeps it."""
    stored, wanted = {}, {}
    for name, tensor in load_file(source / "model.safetensors").items():
        if build := build_of(name):
            pieces, weight = build(tensor.numpy())
            stored |= {name.replace("weight", part): piece for part, piece in pieces.items()}
            wanted[name] = torch.from_numpy(weight)
        else:
            stored[name] = tensor
    save_file(stored, folder / "model.safetensors")
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"] = quantization_config
    (folder / "config.json").write_text(json.dumps(config))
    return wanted
