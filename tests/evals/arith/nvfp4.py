"""The model with its dense layers in NVFP4, as ModelOpt stores them; experts in bfloat16."""

import json
import shutil
from pathlib import Path

import torch
from evals.arith import texts
from safetensors.torch import load_file, save_file
from torch import Tensor

from vllm.ops import nvfp4 as nvfp4_ops
from vllm.utils import fp8

# Of a row for each head or expert: too few for a kernel of 4-bit weights.
_KEPT = (".in_proj_a", ".in_proj_b", ".mlp.gate", ".shared_expert_gate")
_LARGEST = nvfp4_ops.E4M3_MAX * nvfp4_ops.E2M1_MAX


def write(folder: Path, calibration: list[list[int]]) -> None:
    """`calibration`: texts whose activations give the layers' input scales."""
    plain = folder.with_name(f"{folder.name}-bf16")
    weights = _dequantised()
    _write(plain, weights, None)
    largest = _largest_inputs(plain, calibration)
    quantised: dict[str, Tensor] = {}
    for name, weight in weights.items():
        layer = name.removesuffix(".weight")
        if layer not in largest:
            quantised[name] = weight
            continue
        scale = nvfp4_ops.nvfp4_global_scale(weight.abs().max())
        packed, scales = nvfp4_ops.nvfp4_quantize(weight.float(), scale.view(1))
        quantised |= {
            f"{layer}.weight": packed,
            f"{layer}.weight_scale": scales,
            f"{layer}.weight_scale_2": scale.reciprocal(),
            f"{layer}.input_scale": torch.tensor(largest[layer] / _LARGEST),
        }
    ignored = ["lm_head", "*.mlp.experts*", *(f"*{name}" for name in _KEPT)]
    config = {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ignored}
    _write(folder, quantised, config)


def _dequantised() -> dict[str, Tensor]:
    stored = load_file(texts.MODEL / "model.safetensors")
    weights = {}
    for name, tensor in stored.items():
        scales = stored.get(f"{name}_scale_inv")
        if scales is not None:
            tensor = fp8.dequantise_blocks(tensor, scales).bfloat16()
        if not name.endswith("_scale_inv"):
            weights[name] = tensor
    return weights


def _write(folder: Path, weights: dict[str, Tensor], quantisation: dict | None) -> None:
    folder.mkdir(parents=True)
    for file in texts.MODEL.glob("token*.json"):
        shutil.copyfile(file, folder / file.name)
    config = json.loads((texts.MODEL / "config.json").read_text())
    del config["quantization_config"]
    if quantisation is not None:
        config["quantization_config"] = quantisation
    (folder / "config.json").write_text(json.dumps(config))
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def _largest_inputs(folder: Path, calibration: list[list[int]]) -> dict[str, float]:
    """Greatest magnitude of what each dense layer is fed, those that are kept whole excepted."""
    from transformers import Qwen3_5MoeForCausalLM

    model = Qwen3_5MoeForCausalLM.from_pretrained(folder, dtype=torch.float32)
    found: dict[str, float] = {}

    def watch(name: str):
        def see(_, args) -> None:
            found[name] = max(found.get(name, 0.0), float(args[0].abs().max()))

        return see

    for name, module in model.named_modules():
        is_kept = name == "lm_head" or name.endswith(_KEPT)
        if isinstance(module, torch.nn.Linear) and not is_kept:
            module.register_forward_pre_hook(watch(name))
    with torch.no_grad():
        for ids in calibration:
            model(input_ids=torch.tensor([ids]), use_cache=False)
    return found
