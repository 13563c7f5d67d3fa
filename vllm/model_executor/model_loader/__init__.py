"""From a checkpoint to a model that is ready to run."""

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TypeVar
from zlib import crc32

import torch
from torch import Tensor, nn
from tqdm import tqdm

from vllm.config import VllmConfig
from vllm.distributed.agreement import check_same
from vllm.distributed.parallel import Parallel, planned
from vllm.errors import CheckpointError
from vllm.kernels.device_ops import usable_ops
from vllm.kernels.selection import Selection
from vllm.logger import get_logger
from vllm.model_executor.context import ModelContext
from vllm.model_executor.layers.attention import log_cache_scales
from vllm.model_executor.layers.quantization.methods import QuantizationMethods
from vllm.model_executor.model_loader.checkpoint import Checkpoint
from vllm.model_executor.models.decoder import CausalLM
from vllm.model_executor.models.eagle3 import Eagle3Head
from vllm.model_executor.weights import Slot, kernel_layers, layers_on_other_ranks, model_slots
from vllm.utils.torch_utils import DTYPES, SHORT_NAMES

logger = get_logger(__name__)

_MAX_LISTED = 4
Model = TypeVar("Model", bound=nn.Module)


def load_model(
    config: VllmConfig,
    selection: Selection,
    parallel: Parallel | None = None,
    on_chosen: Callable[[Selection], None] | None = None,
    is_draft: bool = False,
) -> CausalLM:
    """Builds the model, fills it from its checkpoint (or at random), and makes its kernels.

    parallel: the ranks that share the model, None for this one alone; it gets its part. on_chosen:
    called when all kernels are chosen and no weight is read yet. is_draft: it drafts tokens for a
    model that is loaded after it, and whose load checks and logs the kernels of both. Every name,
    shape and type is checked against the files' headers before a weight is read.
    Raises CheckpointError; NoKernelError when a layer has no kernel.
    """
    return _load(CausalLM, config, selection, parallel, on_chosen, is_draft)


def load_head(config: VllmConfig, selection: Selection, parallel: Parallel) -> Eagle3Head:
    """The same of a head, which drafts."""
    return _load(Eagle3Head, config, selection, parallel, is_draft=True)


def _load(
    make: Callable[[ModelContext], Model],
    config: VllmConfig,
    selection: Selection,
    parallel: Parallel | None,
    on_chosen: Callable[[Selection], None] | None = None,
    is_draft: bool = False,
) -> Model:
    start = time.perf_counter()
    parallel = parallel or Parallel()
    model_config = config.model_config
    is_dummy, place = model_config.load_format == "dummy", "draft " if is_draft else ""
    checkpoint = None if is_dummy else Checkpoint(model_config.path)
    with torch.device(selection.device.kind):
        context = model_context(config, selection, checkpoint, parallel)
        model = _construct(make, model_config.model, context)
        if not is_draft:
            _check_overrides(context)
        _check_same_kernels(f"{place}chosen", selection, parallel)
        if on_chosen is not None:
            on_chosen(selection)
        slots = model_slots(model)
        if checkpoint is None:
            _fill_randomly(slots, model_config.seed, selection.device.kind)
        else:
            _fill(config, slots, checkpoint, layers_on_other_ranks(model))
        # Kernels are agreed upon within the time of a step; reading may take one rank far longer.
        parallel.barrier(f"{place}read")
        layers = list(kernel_layers(model))
        del slots
        for layer in tqdm(layers, "Preparing kernels", unit="layer", leave=False):
            try:
                layer.make_kernel()
            except ValueError as error:  # a weight whose values no kernel takes
                raise CheckpointError(f"{layer.prefix}: {error}") from error
    _check_same_kernels(f"{place}final", selection, parallel)
    if notice := getattr(model_config.architecture, "notice", ""):
        logger.info(notice)
    if not is_draft:
        log_cache_scales(model)
        selection.log()
    logger.info("Loaded %s in %.1f s", model_config.model, time.perf_counter() - start)
    return model.eval()


def build_model(
    config: VllmConfig,
    selection: Selection,
    checkpoint: Checkpoint | None = None,
    parallel: Parallel | None = None,
) -> CausalLM:
    """The layers of this rank without their weights. Each has asked `selection` for its kernel, and
    no kernel is made yet: on the `meta` device the chip of `selection` may be any."""
    context = model_context(config, selection, checkpoint, parallel)
    model = _construct(CausalLM, config.model_config.model, context)
    _check_overrides(context)
    return model


def _construct(make: Callable[[ModelContext], Model], name: str, context: ModelContext) -> Model:
    try:
        return make(context)
    except RuntimeError as error:
        if "allocate" not in str(error):
            raise
        raise CheckpointError(
            f"{name}: a weight of the size its config.json asks for cannot "
            f"be allocated ({str(error).splitlines()[0]})"
        ) from error


def _check_overrides(context: ModelContext) -> None:
    """A flag may mean layers of another stage alone, so all stages' layers are asked."""
    selection, layout = context.selection, context.parallel.layout
    if layout.pipeline_size > 1:
        selection = selection.afresh()
        rank = layout.data_rank * layout.tensor_size + layout.tensor_rank
        one_stage = replace(layout, rank=rank, pipeline_size=1)
        with torch.device("meta"):
            whole = planned(one_stage, context.parallel.expert.size > 1)
            CausalLM(replace(context, selection=selection, parallel=whole))
    selection.check_overrides()


def _check_same_kernels(place: str, selection: Selection, parallel: Parallel) -> None:
    """ConfigError where a layer has another kernel here than on the first rank of the stage.

    All ranks decide from the same facts, so only a backend whose own checks look at something else
    makes a difference. It is told before ranks wait for each other in vain.
    """
    layout = parallel.layout
    if layout.num_ranks == 1:
        return
    kernels = {
        f"{decision.problem.family} kernel of {layer}": f"{decision.kernel}, activations "
        f"{decision.winner.act}, scales {decision.winner.scales or 'any'}"
        for layer, decision in selection.records
    }
    first = layout.stage * layout.tensor_size
    check_same(layout, parallel.gather, f"{place} kernels", kernels, first)


def model_context(
    config: VllmConfig,
    selection: Selection,
    checkpoint: Checkpoint | None,
    parallel: Parallel | None = None,
) -> ModelContext:
    """The context models are built with. checkpoint None: the weights are to be random."""
    dtype = DTYPES[config.model_config.dtype]
    cache_dtype = config.cache_config.kv_cache_dtype
    decoder, names = config.model_config.decoder, checkpoint.infos if checkpoint else ()
    if ties := config.model_config.ties_embeddings(names):
        decoder = decoder.with_tied_head()
    return ModelContext(
        decoder=decoder,
        dtype=dtype,
        weight_dtype=_weight_dtype(config, checkpoint, dtype),
        quant_methods=QuantizationMethods(config.quant_config),
        selection=selection,
        ops=usable_ops(selection.device.kind),
        kv_cache_format=(
            "fp8" if cache_dtype.startswith("fp8") else SHORT_NAMES[DTYPES.get(cache_dtype, dtype)]
        ),
        max_model_len=config.model_config.max_model_len,
        ties_embeddings=ties,
        parallel=parallel or Parallel(),
    )


def _weight_dtype(
    config: VllmConfig, checkpoint: Checkpoint | None, dtype: torch.dtype
) -> torch.dtype:
    """Of weights that are not quantised: as stored, unless activations are narrower."""
    if checkpoint:
        stored = checkpoint.float_weight_dtype()
    else:
        stored = DTYPES.get(str(config.model_config.stored_dtype))
    return stored if stored and stored.itemsize <= dtype.itemsize else dtype


def _fill(
    config: VllmConfig,
    slots: dict[str, Slot],
    checkpoint: Checkpoint,
    others: frozenset[str],
) -> None:
    """others: layers whose weights other ranks take."""
    quant, slot_name = config.quant_config, config.model_config.slot_name
    taken = list(slots)
    optional = {name for name, slot in slots.items() if slot.is_optional}
    homes: dict[str, Slot] = {}
    unknown = []
    for name in checkpoint.infos:
        home = slot_name(name)
        home = quant.slot_name(home) if quant and home is not None else home
        if home is None:
            continue
        if home in slots:
            homes[name] = slots.pop(home)
        elif others.isdisjoint(_parents(home)):
            unknown.append(name)
    may_lack = optional if optional <= slots.keys() else frozenset[str]()
    missing = [name for name in slots if name not in may_lack and not slots[name].is_redundant]
    _check_mtp(checkpoint, config)
    _check_complete(checkpoint, missing, unknown, taken)
    for name, slot in homes.items():
        _check_tensor(checkpoint, name, slot)
    with tqdm(
        total=checkpoint.num_bytes(), desc="Loading weights", unit="B", unit_scale=True, leave=False
    ) as bar:
        for name, tensor in checkpoint.tensors():
            try:
                if name in homes:
                    homes[name].take(tensor)
            except ValueError as error:
                raise CheckpointError(f"{name}: {error}") from error
            bar.update(tensor.nbytes)


def _parents(name: str) -> Iterator[str]:
    """`a.b.c` -> `a`, `a.b`."""
    return (name[:index] for index, letter in enumerate(name) if letter == ".")


def _check_mtp(checkpoint: Checkpoint, config: VllmConfig) -> None:
    """CheckpointError where it has nothing of the layer that is to draft tokens."""
    decoder, slot_name = config.model_config.decoder, config.model_config.slot_name
    if decoder is None or decoder.mtp is None:
        return
    prefix = decoder.mtp.prefix
    if not any((slot_name(name) or "").startswith(prefix) for name in checkpoint.infos):
        raise CheckpointError(
            f"--speculative-config: method mtp: checkpoint {checkpoint.path} has no layer of "
            f"multi-token prediction (no tensor {prefix}*): leave it out, or take a checkpoint "
            f"that has one"
        )


def _check_complete(
    checkpoint: Checkpoint, missing: list[str], unknown: list[str], taken: list[str]
) -> None:
    """taken: every name that a layer takes."""
    for what, names, others, there in (
        ("lacks", missing, list(checkpoint.infos), "it holds"),
        ("holds tensors unknown to this model:", unknown, taken, "this model takes"),
    ):
        if names:
            more = f" and {len(names) - _MAX_LISTED} more" if len(names) > _MAX_LISTED else ""
            layer = names[0].rpartition(".")[0]
            beside = [name for name in others if name.rpartition(".")[0] == layer]
            hint = f"of {layer} {there} {', '.join(beside[:_MAX_LISTED])}; " if beside else ""
            raise CheckpointError(
                f"checkpoint {checkpoint.path} {what} {', '.join(names[:_MAX_LISTED])}{more}; "
                f"{hint}its files and its config.json do not belong together or are incomplete"
            )


def _check_tensor(checkpoint: Checkpoint, name: str, slot: Slot) -> None:
    info = checkpoint.infos[name]
    if not slot.fits(tuple(info.shape)):
        raise CheckpointError(
            f"{info.file.name}: {name} has shape {list(info.shape)}, but config.json implies "
            f"{list(slot.shape)}"
        )
    if info.dtype not in slot.dtypes:
        accepted = ", ".join(str(d).removeprefix("torch.") for d in slot.dtypes)
        raise CheckpointError(
            f"{info.file.name}: {name} is of type {info.dtype_name}, but {accepted} is needed; "
            f"quantization_config of config.json does not describe this file"
        )


def _fill_randomly(slots: dict[str, Slot], seed: int, device: str) -> None:
    """The same whatever part of the model this rank has."""
    generator = torch.Generator(device)
    needed = [
        (name, slot)
        for name, slot in slots.items()
        if not slot.is_optional and not slot.is_redundant
    ]
    for name, slot in tqdm(needed, "Random weights", unit="tensor", leave=False):
        generator.manual_seed(seed + crc32(name.encode()))
        slot.take(_random_tensor(name, slot, generator))


def _random_tensor(name: str, slot: Slot, generator: torch.Generator) -> Tensor:
    """Weights of the usual spread; FP8 ones use the whole range and a scale that undoes it."""
    if slot.example is not None:
        return slot.example()
    part = name.rpartition(".")[2]
    if name.endswith("norm.weight"):
        return torch.ones(slot.shape)
    if "global_scale" in part:  # a divisor
        return torch.full(slot.shape, 100 / 0.02)
    if "scale" in part:
        is_narrow = slot.dtypes[0] == torch.float8_e4m3fn
        return torch.full(slot.shape, 1.0 if is_narrow else 0.02 / 100)
    if not slot.dtypes[0].is_floating_point:  # packed codes: any bits will do
        bits = torch.iinfo(slot.dtypes[0])
        return torch.randint(
            bits.min, bits.max, slot.shape, generator=generator, dtype=slot.dtypes[0]
        )
    spread = 100.0 if slot.dtypes[0] == torch.float8_e4m3fn else 0.02
    values = torch.empty(slot.shape).normal_(0, spread, generator=generator)
    return values.clamp_(-448, 448).to(slot.dtypes[0])
