"""Trains the model of sums from nothing on one CPU thread and writes it in bfloat16.

    python tests/evals/sums/train.py FOLDER

Weights and activations are rounded to FP8 in every step as a kernel with float32 scales rounds
them, so that the model makes use of all the precision that this format has. FOLDER gets the
checkpoint as transformers writes it, its tokenizer, and `training.json`: settings, the loss on the
way, and the shares of held-out sums that are right with float32 scales and with UE8M0.
"""

import argparse
import json
import math
import platform
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[2]))

from evals.sums import problems, tokenizer

from vllm.ops.fp8 import quantise_groups
from vllm.utils.fp8 import dequantise_blocks, per_block_cast_to_fp8

GROUP = 128
WARMUP = 50
LINE = 0.1  # how far the embeddings of numbers begin along one line, of their spread of 0.04


def model_config():
    from transformers import Qwen3_5TextConfig

    return Qwen3_5TextConfig(
        vocab_size=tokenizer.VOCAB_SIZE,
        hidden_size=128,
        intermediate_size=128,
        num_hidden_layers=1,
        layer_types=["full_attention"],
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=64,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.25,
            "mrope_section": [3, 3, 2],
            "mrope_interleaved": True,
        },
        initializer_range=0.04,
        tie_word_embeddings=False,
        eos_token_id=0,
        use_cache=True,
    )


class Fp8Linear(nn.Linear):
    """Values as an FP8 kernel multiplies them; gradients as if they were not rounded."""

    use_ue8m0 = False

    def forward(self, x: Tensor) -> Tensor:
        weight, scales = per_block_cast_to_fp8(self.weight.detach().bfloat16())
        values = dequantise_blocks(weight, scales)
        if self.use_ue8m0:  # a second rounding
            values = dequantise_blocks(*per_block_cast_to_fp8(values, use_ue8m0=True))
        rows = x.detach().flatten(0, -2)
        q, row_scales = quantise_groups(rows, GROUP, use_ue8m0=self.use_ue8m0)
        rounded = dequantise_blocks(q, row_scales, (1, GROUP)).view_as(x)
        return F.linear(
            x + (rounded - x).detach(), self.weight + (values - self.weight).detach(), self.bias
        )


def make_model(seed: int) -> nn.Module:
    from transformers import Qwen3_5ForCausalLM

    torch.manual_seed(seed)
    model = Qwen3_5ForCausalLM(model_config())
    for module in model.model.layers.modules():
        if type(module) is nn.Linear:
            module.__class__ = Fp8Linear
    with torch.no_grad():
        places = torch.linspace(-1, 1, tokenizer.VOCAB_SIZE)[:, None]
        embeddings = model.model.embed_tokens.weight
        embeddings += LINE * places * torch.randn(1, embeddings.shape[1])
    return model


def logits_of(model: nn.Module, ids: Tensor) -> Tensor:
    """[rows, vocabulary] of the token after the last one; the model's own layers, without masks
    and caches."""
    body = model.model
    positions = torch.arange(ids.shape[1])[None, None].expand(3, 1, -1)
    x = body.embed_tokens(ids)
    rotation = body.rotary_emb(x, positions)
    for layer in body.layers:
        x = layer(x, position_embeddings=rotation, attention_mask=None)
    return model.lm_head(body.norm(x[:, -1]))


@torch.no_grad()
def accuracy(model: nn.Module, use_ue8m0: bool) -> float:
    """Share of the held-out sums that are right."""
    Fp8Linear.use_ue8m0 = use_ue8m0
    terms = problems.held_out()
    best = torch.cat(
        [logits_of(model, tokenizer.prompts(part)).argmax(-1) for part in terms.split(1000)]
    )
    Fp8Linear.use_ue8m0 = False
    return (best == terms.sum(-1) + tokenizer.NUMBER).float().mean().item()


def rate_at(step: int, num_steps: int, peak: float) -> float:
    return peak * min(1, (step + 1) / WARMUP) * 0.5 * (1 + math.cos(math.pi * step / num_steps))


def train(args: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    model = make_model(args.seed)
    generator = torch.Generator().manual_seed(args.seed)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=args.rate, betas=(0.9, 0.98), weight_decay=0.0, fused=True
    )
    log = []
    begin = time.monotonic()
    for step in range(args.steps):
        terms = problems.draw(args.rows, generator)
        for group in optimizer.param_groups:
            group["lr"] = rate_at(step, args.steps, args.rate)
        loss = F.cross_entropy(
            logits_of(model, tokenizer.prompts(terms)), terms.sum(-1) + tokenizer.NUMBER
        )
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if (step + 1) % args.every == 0:
            scores = {
                f"accuracy_{name}": round(accuracy(model, flag), 5)
                for name, flag in (("float32_scales", False), ("ue8m0", True))
            }
            log.append({"step": step + 1, "loss": round(loss.item(), 5)} | scores)
            print(log[-1], f"{time.monotonic() - begin:.0f} s", flush=True)
    save(model, args, log, time.monotonic() - begin)


def save(model: nn.Module, args: argparse.Namespace, log: list, seconds: float) -> None:
    tokenizer.build().save_pretrained(args.folder)
    model.to(torch.bfloat16).save_pretrained(args.folder)
    content = {
        "parameters": sum(p.numel() for p in model.parameters()), "steps": args.steps,
        "rows": args.rows, "rate": args.rate, "seed": args.seed, "device": platform.machine(),
        "torch": torch.__version__, "training_s": round(seconds, 1), "log": log,
    }  # fmt: skip
    (args.folder / "training.json").write_text(json.dumps(content, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=1200)
    parser.add_argument("--rows", type=int, default=512, help="Sums in a step.")
    parser.add_argument("--rate", type=float, default=4e-3, help="Highest learning rate.")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--every", type=int, default=100, help="Steps between log lines.")
    train(parser.parse_args())


if __name__ == "__main__":
    main()
