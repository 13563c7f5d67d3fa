"""Trains the arithmetic model from nothing on one GPU and writes it in bfloat16.

    python tests/evals/arith/train.py FOLDER

FOLDER gets the checkpoint as transformers writes it, its tokenizer and `training.json`: settings,
the loss on the way, and the share of the 1,319 held-out problems of which every token of the
worked answer is the likeliest one after five worked examples. Needs transformers, not our engine.
"""

import argparse
import json
import math
import os
import sys
import time
from collections import deque
from collections.abc import Iterator
from itertools import chain, count, islice
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[2]))

from evals.arith import delta_rule, problems, tokenizer

ROW_TOKENS = 1024
ROWS_PER_SHARD = 128
QUESTION_WEIGHT = 0.2  # of a token's loss: what is asked is random, only answers can be learnt
AUX_WEIGHT = 0.01
NUM_SHOTS = 5


def model_config():
    from transformers import Qwen3_5MoeTextConfig

    return Qwen3_5MoeTextConfig(
        vocab_size=tokenizer.VOCAB_SIZE,
        hidden_size=256,
        num_hidden_layers=6,
        layer_types=["linear_attention", "linear_attention", "full_attention"] * 2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=64,
        linear_value_head_dim=64,
        num_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=128,
        shared_expert_intermediate_size=128,
        max_position_embeddings=2048,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.25,
            "mrope_section": [3, 3, 2],
            "mrope_interleaved": True,
        },
        initializer_range=0.04,
        eos_token_id=0,
        use_cache=True,
    )


# ---------------------------------------------------------------- data


def shard(seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Token ids uint16 [rows, ROW_TOKENS + 1] of worked problems one after the other, and whether
    each token belongs to an answer. Rows begin with a problem, and end wherever they are full."""
    encode = _tokenizer().encode_batch
    ids = np.zeros((ROWS_PER_SHARD, ROW_TOKENS + 1), np.uint16)
    is_answer = np.zeros(ids.shape, bool)
    stream = problems.stream(seed)
    for row in range(ROWS_PER_SHARD):
        place = 0
        # On average, eight fill a row.
        texts = [tokenizer.worked(problem) for problem in islice(stream, 12)]
        for text, encoded in zip(texts, encode(texts)):
            size = min(len(encoded.ids), ROW_TOKENS + 1 - place)
            start = next(i for i, (_, end) in enumerate(encoded.offsets)
                         if end > text.index("\nAnswer:") + 8)  # fmt: skip
            ids[row, place : place + size] = encoded.ids[:size]
            is_answer[row, place + start : place + size] = True
            place += size
        assert place == ROW_TOKENS + 1
    return ids, is_answer


_loaded = []


def _tokenizer():
    if not _loaded:
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
        _loaded.append(tokenizer.build().backend_tokenizer)
    return _loaded[0]


def batches(seed: int, num_rows: int, workers: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Ids int32 [num_rows, ROW_TOKENS + 1] and weights of the loss float32 [num_rows, ROW_TOKENS],
    without end; the same ones for the same seed, however many processes make them."""
    seeds = count(seed * 1_000_000)
    with get_context("fork").Pool(workers) as pool:
        waiting = deque(pool.apply_async(shard, (next(seeds),)) for _ in range(4 * workers))
        while True:
            ids, is_answer = waiting.popleft().get()
            waiting.append(pool.apply_async(shard, (next(seeds),)))
            for start in range(0, ROWS_PER_SHARD, num_rows):
                rows = slice(start, start + num_rows)
                weights = np.where(is_answer[rows, 1:], 1.0, QUESTION_WEIGHT)
                yield (
                    torch.from_numpy(ids[rows].astype(np.int32)),
                    torch.from_numpy(weights.astype(np.float32)),
                )


# ---------------------------------------------------------------- the model, made fast to train


def dense_moe(block: nn.Module, x: Tensor) -> Tensor:
    """What the mixture of experts computes, with every expert for every token: two large GEMMs and
    no sizes that depend on the data. Leaves the load balancing loss in `block.aux`."""
    size = x.shape
    x = x.reshape(-1, size[-1])
    experts, top_k = block.experts, block.gate.top_k
    num_experts, inner2, _ = experts.gate_up_proj.shape
    probabilities = F.linear(x, block.gate.weight).float().softmax(-1)
    values, chosen = probabilities.topk(top_k, -1)
    scores = torch.zeros_like(probabilities).scatter(1, chosen, values)
    share = (scores > 0).float().mean(0)
    block.aux = num_experts * (share * probabilities.mean(0)).sum()
    scores = scores / values.sum(-1, keepdim=True)
    gate, up = (
        F.linear(x, experts.gate_up_proj.flatten(0, 1))
        .view(-1, num_experts, 2, inner2 // 2)
        .unbind(2)
    )
    inner = F.silu(gate) * up * scores[..., None].to(gate.dtype)
    out = inner.flatten(1) @ experts.down_proj.transpose(1, 2).flatten(0, 1).to(inner.dtype)
    shared = block.shared_expert(x) * torch.sigmoid(block.shared_expert_gate(x))
    return (out + shared).reshape(size)


def causal_conv(x: Tensor, weight: Tensor, bias: None, activation: str, **_: object) -> Tensor:
    """silu of a convolution per channel: x [B, channels, T], weight [channels, width]."""
    assert bias is None and activation == "silu"
    width, length = weight.shape[1], x.shape[-1]
    padded = F.pad(x, (width - 1, 0))
    taps = (padded[..., i : i + length] * weight[:, i, None] for i in range(width))
    return F.silu(sum(taps)).to(x.dtype)


def make_model(seed: int, device: str) -> nn.Module:
    from transformers import Qwen3_5MoeForCausalLM
    from transformers.models.qwen3_5_moe import modeling_qwen3_5_moe as modeling

    torch.manual_seed(seed)
    model = Qwen3_5MoeForCausalLM(model_config())
    for layer in model.model.layers:
        if hasattr(layer, "linear_attn"):
            _spread_memory(layer.linear_attn)
        out = getattr(layer, "linear_attn", None)
        out = layer.self_attn.o_proj if out is None else out.out_proj
        for weight in (
            out.weight,
            layer.mlp.experts.down_proj,
            layer.mlp.shared_expert.down_proj.weight,
        ):
            weight.data /= math.sqrt(2 * len(model.model.layers))
    modeling.Qwen3_5MoeSparseMoeBlock.forward = dense_moe
    modeling.torch_chunk_gated_delta_rule = delta_rule.chunked
    modeling.causal_conv1d_fn = causal_conv
    return model.to(device)


def _spread_memory(layer: nn.Module) -> None:
    """Begins with heads that remember from ten to a thousand tokens, as Mamba 2 does."""
    with torch.no_grad():
        layer.A_log.uniform_(1, 8).log_()
        dt = torch.empty_like(layer.dt_bias).uniform_(math.log(1e-3), math.log(1e-1)).exp()
        layer.dt_bias.copy_(dt + torch.log(-torch.expm1(-dt)))


def logits_of(model: nn.Module, ids: Tensor) -> Tensor:
    """[rows, tokens, vocabulary]; the model's own layers, without masks and caches."""
    body = model.model
    positions = torch.arange(ids.shape[1], device=ids.device)[None, None].expand(3, len(ids), -1)
    x = body.embed_tokens(ids)
    rotation = body.rotary_emb(x, positions)
    for layer in body.layers:
        x = layer(x, position_embeddings=rotation, attention_mask=None)
    return model.lm_head(body.norm(x))


def loss_of(model: nn.Module, ids: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """What is minimised, and the mean loss of answers' tokens, in nats."""
    with torch.autocast(ids.device.type, torch.bfloat16, cache_enabled=False):
        logits = logits_of(model, ids[:, :-1])
    losses = F.cross_entropy(
        logits.float().flatten(0, 1), ids[:, 1:].long().flatten(), reduction="none"
    )
    weights = weights.flatten()
    answers = (weights == 1).float()
    aux = sum(layer.mlp.aux for layer in model.model.layers) / len(model.model.layers)
    mean = (losses * weights).sum() / weights.sum()
    return mean + AUX_WEIGHT * aux, ((losses * answers).sum() / answers.sum()).detach()


# ---------------------------------------------------------------- training


class Step:
    """One step of AdamW on fixed buffers; `capture` makes it one CUDA graph."""

    def __init__(self, model: nn.Module, num_rows: int):
        device = model.lm_head.weight.device
        self.model = model
        self.ids = torch.zeros(num_rows, ROW_TOKENS + 1, dtype=torch.int32, device=device)
        self.weights = torch.ones(num_rows, ROW_TOKENS, device=device)
        self.rate = torch.zeros((), device=device)
        self.loss = torch.zeros((), device=device)
        is_cuda = device.type == "cuda"
        decayed = [p for p in model.parameters() if p.ndim > 1]
        others = [p for p in model.parameters() if p.ndim <= 1]
        self.optimizer = torch.optim.AdamW(
            [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}],
            lr=self.rate, betas=(0.9, 0.98), capturable=is_cuda, fused=is_cuda,
        )  # fmt: skip
        self.graph = None

    def __call__(self, ids: Tensor, weights: Tensor, rate: float) -> None:
        self.ids.copy_(ids, non_blocking=True)
        self.weights.copy_(weights, non_blocking=True)
        self.rate.fill_(rate)
        if self.graph is None:
            self.run()
        else:
            self.graph.replay()

    def run(self) -> None:
        for parameter in self.model.parameters():
            parameter.grad = None
        total, loss = loss_of(self.model, self.ids, self.weights)
        total.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0, foreach=True)
        self.optimizer.step()
        self.loss.copy_(loss)
        for layer in self.model.model.layers:
            layer.mlp.aux = None  # or its graph lives on, tied to the stream of this step

    def capture(self) -> None:
        """Nothing may have run before: what backward keeps belongs to the stream it ran on."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):  # at a rate of 0: nothing is learnt of what is in the buffers
                self.run()
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, stream=stream):
            self.run()


def rate_at(step: int, num_steps: int, peak: float) -> float:
    warmup = min(300, num_steps // 10)
    if step < warmup:
        return peak * (step + 1) / warmup
    return peak * 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, num_steps - warmup)))


@torch.no_grad()
def accuracy(model: nn.Module, num_questions: int, num_rows: int = 64) -> float:
    """Share of held-out problems whose answer greedy decoding would give to the letter."""
    encode = _tokenizer().encode
    shots = "".join(tokenizer.worked(p) for p in islice(problems.stream(seed=0), NUM_SHOTS))
    prefix = encode(shots).ids
    rows = []
    for problem in problems.held_out()[:num_questions]:
        question, _, answer = tokenizer.worked(problem).partition("\nAnswer:")
        asked = prefix + encode(f"{question}\nAnswer:").ids
        rows.append((asked, encode(answer).ids))
    device = model.lm_head.weight.device
    trained, model = model, type(model)(model.config)
    model.load_state_dict(trained.state_dict())
    model.to(device, torch.bfloat16).eval()
    num_right = 0
    for start in range(0, len(rows), num_rows):
        part = rows[start : start + num_rows]
        length = max(len(asked) + len(answer) for asked, answer in part)
        ids = torch.zeros(len(part), length, dtype=torch.long)
        for i, (asked, answer) in enumerate(part):
            ids[i, : len(asked) + len(answer)] = torch.tensor(asked + answer)
        best = logits_of(model, ids.to(device)).argmax(-1).cpu()
        for i, (asked, answer) in enumerate(part):
            given = best[i, len(asked) - 1 : len(asked) + len(answer) - 1]
            num_right += given.tolist() == answer
    return num_right / len(rows)


def train(args: argparse.Namespace) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.set_float32_matmul_precision("high")
    workers = max(1, (os.cpu_count() or 2) - 2)
    _tokenizer()
    # Processes are forked before there is a GPU context or a compiler in this one.
    data = batches(args.seed, args.rows, workers)
    first = next(data)
    start = time.monotonic()
    model = make_model(args.seed, device)
    num_parameters = sum(p.numel() for p in model.parameters())
    for layer in model.model.layers:
        if not args.eager:
            layer.compile(fullgraph=True)
    step = Step(model, args.rows)
    if device == "cuda" and not args.eager:
        step.capture()
    else:
        step.run()
    print(f"{num_parameters} parameters, ready after {time.monotonic() - start:.0f} s", flush=True)
    num_steps = _steps_in(args.seconds, step) if args.seconds else args.steps
    log = []
    begin = time.monotonic()
    for number, batch in enumerate(islice(chain([first], data), num_steps)):
        step(*batch, rate_at(number, num_steps, args.rate))
        if number % args.every == 0 or number == num_steps - 1:
            log.append({"step": number, "answer_loss": round(step.loss.item(), 5)})
            seconds = time.monotonic() - begin
            print(f"step {number} loss {step.loss.item():.4f} {seconds:.0f} s", flush=True)
        if args.score_every and number and number % args.score_every == 0:
            print(f"step {number} accuracy {accuracy(model, 256):.4f}", flush=True)
    seconds = time.monotonic() - begin
    score = accuracy(model, args.num_questions)
    print(f"accuracy {score:.4f} after {num_steps} steps, {seconds:.0f} s")
    _save(model, args, log, {
        "parameters": num_parameters, "steps": num_steps, "rows": args.rows,
        "row_tokens": ROW_TOKENS, "rate": args.rate, "seed": args.seed,
        "device": torch.cuda.get_device_name() if device == "cuda" else device,
        "torch": torch.__version__, "training_s": round(seconds, 1),
        "questions": args.num_questions, "shots": NUM_SHOTS, "accuracy_bf16": score,
    })  # fmt: skip


def _steps_in(seconds: float, step: Step) -> int:
    """How many steps fit; measured at a rate of 0."""
    sync = torch.cuda.synchronize if torch.cuda.is_available() else (lambda: None)
    step(step.ids, step.weights, 0.0)
    sync()
    start = time.monotonic()
    for _ in range(20):
        step(step.ids, step.weights, 0.0)
    sync()
    each = (time.monotonic() - start) / 20
    print(f"{1000 * each:.1f} ms a step, {step.weights.numel() / each:.0f} tokens/s", flush=True)
    return int(seconds / each)


def _save(model: nn.Module, args: argparse.Namespace, log: list, facts: dict) -> None:
    tokenizer.save(args.folder)
    model.to(torch.bfloat16).save_pretrained(args.folder)
    content = facts | {"log": log}
    (args.folder / "training.json").write_text(json.dumps(content, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=11_866)
    parser.add_argument("--seconds", type=float, help="As many steps as fit instead of --steps.")
    parser.add_argument("--rows", type=int, default=16, help="Of 1,024 tokens in a step.")
    parser.add_argument("--rate", type=float, default=2e-3, help="Highest learning rate.")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--every", type=int, default=250, help="Steps from one log line to the next."
    )
    parser.add_argument("--score-every", type=int, default=0)
    parser.add_argument("--num-questions", type=int, default=problems.NUM_HELD_OUT)
    parser.add_argument(
        "--eager", action="store_true", help="Without torch.compile and CUDA graph."
    )
    train(parser.parse_args())


if __name__ == "__main__":
    main()
