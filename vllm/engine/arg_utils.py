"""Engine arguments: one table that makes the CLI flags, `LLM(...)`'s keywords and the config."""

import argparse
import json
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from numbers import Integral, Real
from os import PathLike
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Self, TypeVar, get_args

from vllm.config import (
    CacheConfig,
    KernelConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    VllmConfig,
)
from vllm.config.cache import KV_CACHE_DTYPES
from vllm.config.drafting import with_drafts
from vllm.config.kernel import ON_UNMET
from vllm.config.model import DTYPES
from vllm.config.model_rule import REQUANT
from vllm.config.parallel import EXECUTOR_BACKENDS
from vllm.config.scheduler import (
    CPU_BATCHED_TOKENS,
    GPU_BATCHED_TOKENS,
    PROMPT_GRAPH_TOKENS,
    SCHEDULING_POLICIES,
)
from vllm.errors import ConfigError, did_you_mean
from vllm.kernels.select.grade import Grade
from vllm.machine import Device
from vllm.platforms.installed import installed_device
from vllm.utils import dataclasses
from vllm.utils.argparse_utils import FlexibleArgumentParser

ParserType = TypeVar("ParserType", bound=argparse.ArgumentParser)
LOAD_FORMATS = ("auto", "safetensors", "dummy")


def _arg(default: Any, help: str, **options: Any) -> Any:
    """A dataclass field that carries what argparse needs."""
    return dataclasses.field(default=default, metadata={"help": help, **options})


_NUMBER = re.compile(r"([-+]?(?:\d[\d_]*)(?:\.\d+)?)([kmgtKMGT]?)", re.ASCII)
_UNITS = {"": 1} | {unit: 1000**i for i, unit in enumerate("kmgt", 1)} | {
    unit: 1024**i for i, unit in enumerate("KMGT", 1)
}  # fmt: skip
_AUTOMATIC = ("auto", -1)  # values of a field whose default is found by itself
_DTYPES = {"half": "float16", "fp16": "float16", "bf16": "bfloat16", "float": "float32",
           "fp32": "float32"}  # fmt: skip


def whole_number(text: str) -> int:
    """`4096`, `32k` (32,000), `32K` (32,768), `1.5G`; argparse.ArgumentTypeError for others."""
    if match := _NUMBER.fullmatch(text.strip()):
        from decimal import Decimal  # which few commands need

        with suppress(ArithmeticError):
            value = Decimal(match[1]) * _UNITS[match[2]]
            if value == value.to_integral_value():
                return int(value)
    raise argparse.ArgumentTypeError(f"{text!r} is not a whole number such as 4096, 32k or 1.5G")


def json_object(text: str) -> dict[str, Any]:
    """argparse.ArgumentTypeError for any other text."""
    try:
        value = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"not JSON: {error}") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"a JSON object is needed, not {text}")
    return value


@dataclasses.dataclass(kw_only=True)
class EngineArgs:
    """What a user can set about the engine; `model` alone has no flag of its own."""

    model: str
    tokenizer: str | None = _arg(None, "Tokenizer folder or hub name; default: the model's.")
    revision: str | None = _arg(None, "Branch, tag or commit on the hub.")
    served_model_name: str | list[str] | None = _arg(
        None, "Name(s) of the model in the API; default: MODEL as given.", nargs="+"
    )
    skip_tokenizer_init: bool = _arg(False, "Load no tokenizer: prompts and outputs are token ids.")
    trust_remote_code: bool = _arg(False, "Run Python code that comes with the model's config.")
    dtype: str = _arg(
        "auto", "Dtype of activations; auto: float32 on the CPU, bfloat16 or float16 on a GPU.",
        choices=DTYPES,
    )  # fmt: skip
    quantization: str | None = _arg(
        None, "Quantise a bf16 checkpoint at load (fp8); default: the checkpoint's method.",
        short="-q",
    )  # fmt: skip
    load_format: str = _arg("auto", "dummy: random weights, for benchmarks.", choices=LOAD_FORMATS)
    max_model_len: int | None = _arg(
        None, "Maximum tokens of a request, prompt and output; auto or -1: as many as the model "
        "takes and memory holds (default).", is_automatic=True,
    )  # fmt: skip
    hf_overrides: dict[str, Any] | None = _arg(
        None, "JSON object that overrides fields of config.json."
    )
    seed: int = _arg(0, "Seed of the engine's random numbers and of dummy weights.")
    max_num_seqs: int = _arg(256, "Maximum requests in the running batch.")
    max_num_batched_tokens: int | None = _arg(
        None, "Maximum tokens of one step; longer prompts are chunked."
    )
    max_num_seqs_per_client: int | None = _arg(
        None, "Maximum running sequences of one client (API key, or address): more of them wait. "
        "Default: no limit; clients that wait share the places equally.",
    )  # fmt: skip
    max_prefill_share: float = _arg(
        SchedulerConfig.max_prefill_share, "Share of a step's tokens, above 0 to 1, that prompts "
        "longer than a step take at most while other requests generate.",
    )  # fmt: skip
    stream_interval: int = _arg(
        SchedulerConfig.stream_interval, "Tokens that an event of a stream has at least, after the "
        "first and before the last: more of them cost the process that answers HTTP less.",
    )  # fmt: skip
    scheduling_policy: str = _arg(
        SCHEDULING_POLICIES[0], "Order of waiting requests: by arrival, or by their field "
        "`priority`, lower ones first.", choices=SCHEDULING_POLICIES,
    )  # fmt: skip
    speculative_config: dict[str, Any] | None = _arg(
        None, "JSON object: draft tokens that later steps verify, as in {\"method\": \"ngram\", "
        "\"num_speculative_tokens\": 4}. Default: none are drafted.", short="-sc",
    )  # fmt: skip
    block_size: int = _arg(CacheConfig.block_size, "Tokens per KV cache block.")
    kv_cache_dtype: str = _arg(
        "auto", "Dtype of the KV cache; auto: the dtype of activations.", choices=KV_CACHE_DTYPES
    )
    num_gpu_blocks_override: int | None = _arg(
        None,
        "Number of KV cache blocks, on any device; default: sized from memory. Of window "
        "layers more fit into them.",
    )
    kv_cache_memory_bytes: int | None = _arg(
        None, "Bytes of each rank's KV cache, on any device, instead of what memory leaves."
    )
    gpu_memory_utilization: float = _arg(0.9, "Share of the GPU's memory to use, 0 to 1.")
    enable_prefix_caching: bool | None = _arg(
        None, "Reuse KV blocks of equal prompt prefixes. Default: on, except for models with "
        "recurrent states.",
        action=argparse.BooleanOptionalAction,
    )  # fmt: skip
    num_state_snapshots: int = _arg(
        CacheConfig.num_state_snapshots, "Recurrent states kept for equal prompt prefixes, with "
        "--enable-prefix-caching.",
    )  # fmt: skip
    disable_hybrid_kv_cache_manager: bool = _arg(
        False, "Layers with a window keep K and V of all tokens too.",
        action=argparse.BooleanOptionalAction,
    )  # fmt: skip
    enforce_eager: bool = _arg(False, "Run without CUDA graphs. No effect on the CPU.")
    max_prompt_graph_tokens: int | None = _arg(
        None, "Largest step with prompts that a CUDA graph is captured for, in tokens; 0: none. "
        "Default: 4096, or --max-num-batched-tokens where that is less, on a GPU with CUDA graphs. "
        "Those beyond 2048 are captured where the host launches them more slowly than they run.",
    )  # fmt: skip
    debug_numerics: bool = _arg(
        False, "Check the output of every layer; when a request fails for NaN or infinity, name "
        "the first such layer. Slow, without CUDA graphs.",
    )  # fmt: skip
    tensor_parallel_size: int = _arg(1, "Number of tensor-parallel ranks.", short="-tp")
    pipeline_parallel_size: int = _arg(1, "Number of pipeline-parallel stages.", short="-pp")
    data_parallel_size: int = _arg(1, "Number of data-parallel engines.", short="-dp")
    enable_expert_parallel: bool = _arg(
        False, "Distribute whole experts over tensor- and data-parallel ranks; see "
        "VLLM_ALL2ALL_BACKEND.", short="-ep",
    )  # fmt: skip
    distributed_executor_backend: str | None = _arg(
        None, "Where ranks run: uni in the engine's process (one rank), mp in processes of this "
        "machine, ray on a Ray cluster. Default: uni for one rank, else mp.",
        choices=EXECUTOR_BACKENDS,
    )  # fmt: skip
    distributed_timeout_seconds: float = _arg(
        ParallelConfig.distributed_timeout_seconds,
        "Maximum time that one rank waits for another before the engine ends.",
    )  # fmt: skip
    kernel: Sequence[str] | None = _arg(
        None, "PATTERN=BACKEND: kernel backend of the layers whose name matches; or "
        "PATTERN=path/to/file.py:Name, one's own. Repeatable.",
        action="append", metavar="PATTERN=BACKEND",
    )  # fmt: skip
    linear_backend: str | None = _arg(
        None, "Kernel backend of linear layers; default: chosen by the selector."
    )
    moe_backend: str | None = _arg(None, "Kernel backend of mixture-of-experts layers.")
    attention_backend: str | None = _arg(None, "Kernel backend of attention layers.")
    on_unmet: str = _arg(
        "error", "If a requested backend cannot run: stop with an error, or use the next one.",
        choices=ON_UNMET,
    )  # fmt: skip
    require_native: bool = _arg(
        False, "Refuse weight-only and emulated kernels for quantised weights."
    )
    max_requant_error: float | None = _arg(
        None, "Maximum relative error of re-quantising a weight at load."
    )
    requant: str = _arg(
        REQUANT[0],
        "When weights may be re-quantised to UE8M0 scales for a kernel: not for models that are "
        "known to lose accuracy, only where nothing is rounded, or always.",
        choices=REQUANT,
    )
    require_evidence: str = _arg(
        Grade.COMPILED,
        "The least that must be known of a kernel on this chip: run keeps kernels out that never "
        "ran on it, measured those that nobody timed here for the size.",
        choices=tuple(map(str, Grade)),
    )
    dump_decisions: Path | None = _arg(
        None, "File to write every kernel decision to, as JSON.", metavar="FILE"
    )

    def __post_init__(self) -> None:
        """ConfigError for a value of a type that its field does not have."""
        for f in dataclasses.fields(self):
            setattr(self, f.name, _of_its_type(f, getattr(self, f.name)))

    @classmethod
    def from_keywords(cls, **keywords: Any) -> "EngineArgs":
        """From keyword arguments, as of `LLM(...)`; an unknown one is a ConfigError."""
        names = [f.name for f in dataclasses.fields(cls)]
        for name in keywords:
            if name not in names:
                raise ConfigError(f"unknown engine argument {name!r}{did_you_mean(name, names)}")
        return cls(**keywords)

    @classmethod
    def from_cli_args(cls, args: argparse.Namespace, model: str | None = None) -> Self:
        """model: None for that of `args`."""
        names = [f.name for f in dataclasses.fields(cls) if f.name != "model"]
        return cls(model=model or args.model, **{name: getattr(args, name) for name in names})

    @classmethod
    def add_cli_args(
        cls, parser: ParserType, title: str = "", only: Sequence[str] = ()
    ) -> ParserType:
        """Adds a flag per field, named after it, and returns the parser. title: of their group; "":
        one group for each config. only: these fields, () for all. `--model` is added to a
        FlexibleArgumentParser alone: commands have MODEL."""
        if isinstance(parser, FlexibleArgumentParser):
            parser.add_argument("--model", required=True, help="Folder or hub name.")
        groups: dict[str, Any] = {}
        for f in dataclasses.fields(cls):
            if f.name == "model" or (only and f.name not in only):
                continue
            own = title or _config_of(f.name)
            group = groups.get(own) or groups.setdefault(own, parser.add_argument_group(own))
            options = dict(f.metadata)
            names = ["--" + f.name.replace("_", "-"), *filter(None, [options.pop("short", None)])]
            is_automatic = options.pop("is_automatic", False)
            if f.type is bool:
                options["action"] = argparse.BooleanOptionalAction
            elif "action" not in options:
                options["type"] = _automatic if is_automatic else _parser_of(f)
            group.add_argument(*names, default=f.default, **options)
        return parser

    def _arguments_of(self, config: type, **resolved: Any) -> dict[str, Any]:
        """Arguments that are fields of `config`, and those `resolved` from others."""
        names = [f.name for f in dataclasses.fields(config)]
        return {name: getattr(self, name) for name in names if hasattr(self, name)} | resolved

    def create_model_config(self) -> ModelConfig:
        """Of the model alone; raises as `create_engine_config`."""
        return self.create_engine_config().model_config

    def create_engine_config(self, device: Device | None = None) -> VllmConfig:
        """Resolves everything; raises ConfigError or CheckpointError.

        device: what it is to run on, None for what this machine has.
        """
        device = device or installed_device()
        if self.load_format not in LOAD_FORMATS:
            raise ConfigError(
                f"--load-format {self.load_format!r} is unknown: it takes {', '.join(LOAD_FORMATS)}"
            )
        model = self._arguments_of(
            ModelConfig, revision=self.revision, hf_overrides=self.hf_overrides, device=device
        )
        model_config = ModelConfig.load(**model)
        parallel_config = ParallelConfig(**self._arguments_of(ParallelConfig))
        cache = self._arguments_of(CacheConfig, num_blocks=self.num_gpu_blocks_override)
        if self.enable_prefix_caching is None:
            # To keep recurrent states takes memory, and a step more for each prompt.
            cache["enable_prefix_caching"] = not model_config.has_recurrent_states
        kernel = (self.kernel,) if isinstance(self.kernel, str) else tuple(self.kernel or ())
        model_config, speculative_config = with_drafts(
            self.speculative_config, model_config, parallel_config, device
        )
        return VllmConfig(
            model_config=model_config,
            cache_config=CacheConfig(**cache),
            scheduler_config=self._scheduler_config(model_config, parallel_config, device),
            parallel_config=parallel_config,
            kernel_config=KernelConfig(**self._arguments_of(KernelConfig, kernel=kernel)),
            speculative_config=speculative_config,
        )

    def _scheduler_config(
        self, model_config: ModelConfig, parallel_config: ParallelConfig, device: Device
    ) -> SchedulerConfig:
        is_cpu = device.kind == "cpu"
        max_tokens = self.max_num_batched_tokens
        if max_tokens is None:
            max_tokens = CPU_BATCHED_TOKENS if is_cpu else GPU_BATCHED_TOKENS
            max_tokens = max(max_tokens, self.max_num_seqs)
        graph_tokens = self.max_prompt_graph_tokens
        if graph_tokens is None:
            is_eager = is_cpu or model_config.enforce_eager or parallel_config.needs_eager
            # In lock-step, data-parallel ranks do not capture prompts.
            is_captured = not (is_eager or parallel_config.is_in_lock_step)
            graph_tokens = min(PROMPT_GRAPH_TOKENS, max_tokens) if is_captured else 0
        return SchedulerConfig(
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=max_tokens,
            max_prompt_graph_tokens=graph_tokens,
            policy=self.scheduling_policy,
            max_num_seqs_per_client=self.max_num_seqs_per_client,
            max_prefill_share=self.max_prefill_share,
            stream_interval=self.stream_interval,
        )


@dataclasses.dataclass(kw_only=True)
class AsyncEngineArgs(EngineArgs):
    """EngineArgs of AsyncLLM. Both further fields have no effect: AsyncLLM logs neither."""

    enable_log_requests: bool = _arg(False, "No effect.")
    disable_log_stats: bool = _arg(False, "No effect.")


def _config_of(field: str) -> str:
    """The name of the config that a field becomes a part of."""
    if field == "num_gpu_blocks_override":
        return CacheConfig.__name__
    if field == "speculative_config":
        return VllmConfig.__name__
    configs = (CacheConfig, SchedulerConfig, ParallelConfig, KernelConfig)
    found = (c for c in configs if any(f.name == field for f in dataclasses.fields(c)))
    return next(found, ModelConfig).__name__


def _parser_of(f: "dataclasses.Field") -> Callable[[str], Any]:
    """What makes the value of a field of the text of its flag."""
    if f.name == "dtype":
        return lambda text: _DTYPES.get(text, text)
    kind = _kinds(f)[0]
    own = {int: whole_number, dict[str, Any]: json_object}
    return own.get(kind) or _TYPES[kind][1]


def _automatic(text: str) -> int | None:
    return None if text in map(str, _AUTOMATIC) else whole_number(text)


def _is_number(value: Any, kind: type) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool)


def _is_text(value: Any) -> bool:
    return isinstance(value, str | PathLike)


def _are_texts(value: Any) -> bool:
    return isinstance(value, list | tuple) and all(isinstance(text, str) for text in value)


# Type of a field -> whether a value is of it, what makes it so, and what that is called. The
# numbers of numpy are numbers.
_TYPES: dict[Any, tuple[Callable[[Any], bool], Callable[[Any], Any], str]] = {
    bool: (lambda value: isinstance(value, bool), bool, "True or False"),
    int: (lambda value: _is_number(value, Integral), int, "a whole number"),
    float: (lambda value: _is_number(value, Real), float, "a number"),
    str: (_is_text, str, "a text"),
    list[str]: (_are_texts, list, "a list of texts"),
    Sequence[str]: (lambda value: isinstance(value, str) or _are_texts(value), lambda v: v,
                    "a text or a list of texts"),
    dict[str, Any]: (lambda value: isinstance(value, dict), dict, "a dict"),
    Path: (_is_text, Path, "a path"),
}  # fmt: skip


def _kinds(f: "dataclasses.Field") -> list[Any]:
    """The types of a field, None aside."""
    kinds = get_args(f.type) if isinstance(f.type, UnionType) else (f.type,)
    return [kind for kind in kinds if kind is not NoneType]


def _of_its_type(f: "dataclasses.Field", value: Any) -> Any:
    """`value` as the field's type has it; None is the default of any field that has one."""
    if value is None and f.default is not dataclasses.MISSING:
        return f.default
    if f.metadata.get("is_automatic") and value in _AUTOMATIC:
        return None
    if isinstance(value, str) and not value.strip() and f.name != "served_model_name":
        fix = "give a folder or a hub name" if f.name == "model" else "leave it out for the default"
        raise ConfigError(f"{f.name} is empty: {fix}")
    if f.name == "dtype" and (isinstance(value, str) or str(value).startswith("torch.")):
        name = str(value).removeprefix("torch.")
        value = _DTYPES.get(name, name)
    for is_of_type, convert, _ in (_TYPES[kind] for kind in _kinds(f)):
        if is_of_type(value):
            return convert(value)
    accepted = " or ".join(_TYPES[kind][2] for kind in _kinds(f))
    raise ConfigError(f"{f.name}={value!r}: it takes {accepted}")
