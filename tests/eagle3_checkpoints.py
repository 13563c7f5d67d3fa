"""Tiny EAGLE-3 heads, and what they draft in float64 by the formula of the paper."""

import json
import re
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional
from transformers import AutoModelForCausalLM

HEADS = 8, 4, 16
"""Heads, KV heads and their size."""


def sure_model(source: Path, folder: Path) -> Path:
    """The checkpoint `source`, looking at the last token and hardly at others."""
    tensors = load_file(source / "model.safetensors")
    for name, weight in tensors.items():
        if re.search(r"(o_proj|down_proj)([._](weight|bias))?$", name):
            weight *= 0.02
    return write(folder, tensors, json.loads((source / "config.json").read_text()))


def write(folder: Path, tensors: dict, config: dict) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def make_head(
    model: Path,
    folder: Path,
    ids: tuple[int, ...] = (),
    num_drafts: int | None = 64,
    heads: tuple[int, int, int] = HEADS,
    is_sure: bool = True,
    is_speculators: bool = False,
    with_embeddings: bool = False,
    with_lm_head: bool = True,
    **flags,
) -> Path:
    """A random head for the model of a folder. num_drafts: tokens of its vocabulary, None for all.
    is_sure: it drafts what often follows the last token in a model of `sure_model`. flags: of its
    config."""
    fields = json.loads((model / "config.json").read_text())
    size, vocab, num_inputs = fields["hidden_size"], fields["vocab_size"], len(ids) or 3
    generator = torch.Generator().manual_seed(11)
    stored = {
        name: tensor.float()
        for name, tensor in load_file(model / "model.safetensors").items()
        if name in ("model.norm.weight", "lm_head.weight", "model.embed_tokens.weight")
    }
    own = _layer(size, heads, generator)
    fc, last_norm = _random(generator, size, num_inputs * size), _norm(generator, size)
    if is_sure:
        _look_at_the_last_token(own, size, heads)
        fc, last_norm = 0.01 * fc, stored["model.norm.weight"]
    prefix = "layers.0." if is_speculators else "midlayer."
    tensors = {f"{prefix}{name}.weight": weight for name, weight in own.items()}
    tensors |= {"fc.weight": fc, "norm.weight": last_norm}
    kept = torch.arange(vocab)
    if num_drafts is not None:
        kept = torch.randperm(vocab, generator=generator)[:num_drafts].sort().values
        tensors["d2t"] = kept - torch.arange(num_drafts)
        tensors["t2d"] = torch.zeros(vocab, dtype=torch.bool).index_fill_(0, kept, True)
    table = stored["model.embed_tokens.weight"]
    if with_lm_head:
        tensors["lm_head.weight"] = stored.get("lm_head.weight", table)[kept]
    if with_embeddings:
        tensors["embed_tokens.weight"] = table + 0.1 * _random(generator, size)
    if flags.get("norm_before_fc"):
        tensors["input_norm.weight"] = _norm(generator, num_inputs * size)
    flags |= {"draft_vocab_size": len(kept)}
    if ids:
        flags["eagle_aux_hidden_state_layer_ids"] = list(ids)
    return write(folder, tensors, _config(size, vocab, heads, is_speculators, flags))


def _random(generator, *shape):
    return torch.randn(shape, generator=generator) * (1.3 / shape[-1] ** 0.5)


def _norm(generator, width):
    return 1 + 0.3 * torch.randn(width, generator=generator)


def _layer(size: int, heads: tuple[int, int, int], generator) -> dict:
    num_heads, num_kv_heads, head_dim = heads
    shapes = {
        "self_attn.q_proj": (num_heads * head_dim, 2 * size),
        "self_attn.k_proj": (num_kv_heads * head_dim, 2 * size),
        "self_attn.v_proj": (num_kv_heads * head_dim, 2 * size),
        "self_attn.o_proj": (size, num_heads * head_dim),
        "mlp.gate_proj": (2 * size, size),
        "mlp.up_proj": (2 * size, size),
        "mlp.down_proj": (size, 2 * size),
    }
    norms = "hidden_norm", "input_layernorm", "post_attention_layernorm"
    return {name: _random(generator, *shape) for name, shape in shapes.items()} | {
        name: _norm(generator, size) for name in norms
    }


def _config(size, vocab, heads, is_speculators: bool, flags: dict) -> dict:
    layer = {
        "model_type": "llama", "vocab_size": vocab, "hidden_size": size,
        "intermediate_size": 2 * size, "num_hidden_layers": 1, "num_attention_heads": heads[0],
        "num_key_value_heads": heads[1], "head_dim": heads[2], "max_position_embeddings": 64,
        "rms_norm_eps": 1e-5, "rope_theta": 5000.0, "rope_scaling": None, "hidden_act": "silu",
    }  # fmt: skip
    if not is_speculators:
        return {"architectures": ["LlamaForCausalLMEagle3"], **layer, **flags}
    return {
        "architectures": ["Eagle3Speculator"], "speculators_model_type": "eagle3",
        "auto_map": {"": "eagle3.Eagle3SpeculatorConfig"}, "transformer_layer_config": layer,
        **flags,
    }  # fmt: skip


def _look_at_the_last_token(own: dict, size: int, heads: tuple[int, int, int]) -> None:
    """Attention is on its own position, whose embedding it passes on."""
    for name in ("q_proj", "k_proj"):
        own[f"self_attn.{name}"][:, size:] *= 0.02
        own[f"self_attn.{name}"] *= 3
    num_heads, *kv = heads
    group = num_heads // kv[0]
    keys = own["self_attn.k_proj"].unflatten(0, kv)
    own["self_attn.q_proj"] = keys.repeat_interleave(group, 0).flatten(0, 1)
    values = torch.linalg.qr(own["self_attn.v_proj"][:, :size])[0]
    own["self_attn.v_proj"] = torch.cat([values, torch.zeros_like(values)], 1)
    back = values.unflatten(0, kv).repeat_interleave(group, 0) / group
    own["self_attn.o_proj"] = back.flatten(0, 1).T
    own["mlp.down_proj"] *= 0.1
    for name in ("hidden_norm", "input_layernorm"):
        own[name] = torch.ones(size)


class Reference:
    """y_i = layer(embedding of token i + 1, x_i) with x = fc(hidden states of the model), in
    float64; the token is that of the likeliest row of lm_head norm(y_i), and y_i in the place of
    x_(i+1) gives the next. layers: as many of whose inputs it reads, the number of layers for what
    the last one gives."""

    def __init__(self, model: Path, head: Path, layers: tuple[int, ...]):
        self.main = AutoModelForCausalLM.from_pretrained(
            model, dtype=torch.float64, attn_implementation="eager", experts_implementation="eager"
        ).eval()
        stored = load_file(head / "model.safetensors")
        fields = json.loads((head / "config.json").read_text())
        self.fields = fields | fields.get("transformer_layer_config", {})
        self.layers = layers
        self.head_dim = self.fields["head_dim"]
        self.group = self.fields["num_attention_heads"] // self.fields["num_key_value_heads"]
        self.own = {
            name.removeprefix("midlayer.").removeprefix("layers.0.").removesuffix(".weight"):
            tensor.double() if tensor.is_floating_point() else tensor
            for name, tensor in stored.items()
        }  # fmt: skip

    def _norm(self, x, name):
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.fields["rms_norm_eps"])
        return x * self.own[name]

    @torch.inference_mode()
    def aux(self, tokens: list[int]):
        """Hidden states [n, k * hidden size] that the head reads."""
        base, found = self.main.model, {}

        def keep(index):
            return lambda module, args, kwargs=None: found.__setitem__(index, args[0][0])

        parts = [*base.layers, base.norm]
        hooks = [part.register_forward_pre_hook(keep(i)) for i, part in enumerate(parts)]
        base(torch.tensor([tokens]))
        for hook in hooks:
            hook.remove()
        h = torch.cat([found[index] for index in self.layers], -1)
        if self.fields.get("norm_before_fc"):
            h = self._norm(h, "input_norm")
        return h @ self.own["fc"].T

    def _rotated(self, x):
        """x [n, heads, head_dim]."""
        half = self.head_dim // 2
        rates = self.fields["rope_theta"] ** (-torch.arange(half, dtype=torch.float64) / half)
        angles = (torch.arange(len(x))[:, None] * rates)[:, None]
        first, second = x[..., :half], x[..., half:]
        return torch.cat([first * angles.cos() - second * angles.sin(),
                          second * angles.cos() + first * angles.sin()], -1)  # fmt: skip

    @torch.inference_mode()
    def states(self, tokens: list[int], x):
        """[n, hidden size], of the tokens after those of x [n, hidden size]."""
        own = self.own
        ids = torch.tensor(tokens)
        table = own.get("embed_tokens")
        embeddings = self.main.model.embed_tokens(ids) if table is None else table[ids]
        normed = self._norm(x, "hidden_norm")
        both = torch.cat([self._norm(embeddings, "input_layernorm"), normed], -1)
        q, k, v = (
            (both @ own[f"self_attn.{name}_proj"].T).unflatten(-1, (-1, self.head_dim))
            for name in "qkv"
        )
        q, k = self._rotated(q), self._rotated(k)
        k, v = (part.repeat_interleave(self.group, 1) for part in (k, v))
        scores = torch.einsum("ihd,jhd->hij", q, k) * self.head_dim**-0.5
        mask = torch.full(scores.shape[1:], -torch.inf, dtype=torch.float64).triu(1)
        mixed = torch.einsum("hij,jhd->ihd", (scores + mask).softmax(-1), v).flatten(1)
        residual = normed if self.fields.get("norm_before_residual") else x
        y = residual + mixed @ own["self_attn.o_proj"].T
        z = self._norm(y, "post_attention_layernorm")
        gate = functional.silu(z @ own["mlp.gate_proj"].T)
        return y + (gate * (z @ own["mlp.up_proj"].T)) @ own["mlp.down_proj"].T

    def logits(self, states):
        normed = self._norm(states, "norm")
        weight = self.own.get("lm_head")
        with torch.inference_mode():
            return self.main.lm_head(normed) if weight is None else normed @ weight.T

    def token(self, state) -> int:
        best = int(self.logits(state).argmax())
        return best + int(self.own["d2t"][best]) if "d2t" in self.own else best

    def drafts(self, known: list[int], count: int) -> list[int]:
        x, tokens = self.aux(known)[:-1], known[1:]
        for _ in range(count):
            y = self.states(tokens, x)[-1:]
            x, tokens = torch.cat([x, y]), [*tokens, self.token(y)]
        return tokens[len(known) - 1 :]
