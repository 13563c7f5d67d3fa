"""Tiny checkpoints with a layer of multi-token prediction, and what it drafts in float64."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

# Layer of transformers that the decoder layer is like; names of what is around it.
_NUMBERED = ("enorm", "hnorm", "eh_proj", "shared_head.norm")
_SEPARATE = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm")
_FULL_ATTENTION = 2


def _is_separate(config) -> bool:
    return config.model_type.startswith("qwen3")


def _names(config) -> tuple[str, str, tuple[str, ...]]:
    """Prefix of the parts around the layer, that of the layer, and the names of the parts."""
    if _is_separate(config):
        return "mtp.", "mtp.layers.0.", _SEPARATE
    prefix = f"model.layers.{config.num_hidden_layers}."
    return prefix, prefix, _NUMBERED


def _layer(main):
    base, config = main.model, main.config
    index = _FULL_ATTENTION if _is_separate(config) else config.num_hidden_layers - 1
    layer = type(base.layers[-1])(config, index).double().eval()
    return layer


def add_mtp(source: Path, folder: Path, is_sure: bool = False) -> Path:
    """The checkpoint `source` with a random draft layer. is_sure: the model and the layer look at
    the last token and hardly at others, so what the layer drafts is often what the model says."""
    main = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    prefix, layer_prefix, names = _names(main.config)
    generator = torch.Generator().manual_seed(7)
    hidden = main.config.hidden_size
    tensors = load_file(source / "model.safetensors")
    own = {}
    for name, weight in _layer(main).float().state_dict().items():
        values = torch.randn(weight.shape, generator=generator)
        if name.endswith("norm.weight"):
            values = 1 + 0.3 * values
        own[layer_prefix + name] = values * (0.2 if weight.ndim == 1 and "norm" not in name
                                             else 1 if weight.ndim == 1
                                             else 1.3 / weight.shape[-1] ** 0.5)  # fmt: skip
    for name in (names[0], names[1], names[3]):
        own[f"{prefix}{name}.weight"] = 1 + 0.3 * torch.randn(hidden, generator=generator)
    proj = torch.randn(hidden, 2 * hidden, generator=generator) * (1.3 / (2 * hidden) ** 0.5)
    if is_sure:
        proj = torch.cat([torch.eye(hidden), 0.02 * proj[:, :hidden]], 1)
        own[f"{prefix}{names[0]}.weight"].fill_(1.0)
        own[f"{prefix}{names[3]}.weight"] = tensors["model.norm.weight"].clone()
        for name, weight in (tensors | own).items():
            if name.endswith(("o_proj.weight", "down_proj.weight", "down_proj")):
                weight *= 0.1
    own[f"{prefix}{names[2]}.weight"] = proj
    if not _is_separate(main.config):  # as published: again, and not to be read
        own[f"{prefix}embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
        own[f"{prefix}shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    return write(source, folder, tensors | own)


def write(source: Path, folder: Path, tensors: dict, **changes) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((source / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(config))
    return folder


class Reference:
    """y_i = norm(layer(proj [norm(embedding of token i + 1), norm(x_i)])), in float64, where x is
    what the model's last norm gives; y in its place, and what it says, give the next."""

    def __init__(self, folder: Path):
        self.main = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float64, attn_implementation="eager", experts_implementation="eager"
        ).eval()
        tensors = load_file(folder / "model.safetensors")
        prefix, layer_prefix, names = _names(self.main.config)
        self.layer = _layer(self.main)
        self.layer.load_state_dict(
            {name: tensors[layer_prefix + name].double() for name in self.layer.state_dict()}
        )
        self.weights = [tensors[f"{prefix}{name}.weight"].double() for name in names]

    def _norm(self, x, weight):
        config = self.main.config
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + config.rms_norm_eps)
        return x * (1 + weight if _is_separate(config) else weight)

    @torch.inference_mode()
    def hidden(self, tokens: list[int]):
        return self.main.model(torch.tensor([tokens])).last_hidden_state[0]

    @torch.inference_mode()
    def states(self, tokens: list[int], hidden):
        """[n, hidden size], of the tokens after those of hidden [n, hidden size]."""
        embedding_norm, hidden_norm, proj, norm = self.weights
        embeddings = self.main.model.embed_tokens(torch.tensor(tokens))
        both = self._norm(embeddings, embedding_norm), self._norm(hidden, hidden_norm)
        x = (torch.cat(both, -1) @ proj.T)[None]
        positions = torch.arange(len(tokens))[None]
        mask = torch.full((len(tokens),) * 2, -torch.inf, dtype=torch.float64).triu(1)
        y = self.layer(
            x,
            attention_mask=mask[None, None],
            position_ids=positions,
            position_embeddings=self.main.model.rotary_emb(x, position_ids=positions),
        )
        return self._norm(y[0], norm)

    def logits(self, states):
        with torch.inference_mode():
            return self.main.lm_head(states)

    def drafts(self, known: list[int], count: int) -> list[int]:
        hidden, tokens = self.hidden(known)[:-1], known[1:]
        for _ in range(count):
            y = self.states(tokens, hidden)[-1:]
            hidden, tokens = torch.cat([hidden, y]), [*tokens, int(self.logits(y).argmax())]
        return tokens[len(known) - 1 :]
