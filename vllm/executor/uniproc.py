"""The executor of one rank in this process."""

from typing import Any

import torch
from torch import Tensor

from vllm.config import VllmConfig
from vllm.config.selection import Facts, selection_for
from vllm.core.outputs import SchedulerOutput
from vllm.distributed import world
from vllm.distributed.custom_all_reduce import make_custom_all_reduce
from vllm.distributed.layout import Layout
from vllm.distributed.parallel import Parallel
from vllm.errors import ConfigError
from vllm.executor import prefetch
from vllm.executor.base import Address, PendingOutput
from vllm.executor.facts import facts_of, probed_facts, with_failures_of_all
from vllm.kernels.jit.caches import use_caches, warn_of_another_machine
from vllm.kernels.jit.monitor import MONITOR
from vllm.kernels.selection import Selection
from vllm.utils.startup import current_report
from vllm.utils.torch_utils import DTYPES
from vllm.worker.model_runner import ModelRunner


class UniprocExecutor:
    """selection: its kernel decisions. runner: the model, its KV cache and batch. report: start-up
    time by phase."""

    def __init__(
        self, config: VllmConfig, rendezvous: Address | None = None, layout: Layout | None = None
    ):
        """layout: this rank's position; None: the only rank of engine `data_parallel_rank`."""
        if layout is None:
            ranks = config.parallel_config
            use_device(ranks.data_parallel_rank, ranks.data_parallel_size)
            layout = engine_layout(config, 0)
        self.report = report = current_report()
        report.count_rest("imports")
        with report.phase("libraries and device"):
            prefetch.finish()
            if torch.cuda.is_available():
                use_caches()  # before a library is loaded
            facts = probed_facts()
            if torch.cuda.is_available():
                triton = facts.libs.get("triton")
                MONITOR.watch(with_triton=triton is not None and not triton.broken)
            warn_of_another_machine(facts.device, facts.libs)
        parallel = Parallel()
        if layout.num_ranks > 1:
            assert rendezvous is not None
            with report.phase("connecting ranks"):
                parallel = _join(config, layout, rendezvous, facts)
                facts = with_failures_of_all(facts, parallel)
        self.selection = make_selection(config, facts)
        self.runner = ModelRunner(config, self.selection, report, parallel)
        MONITOR.serve()
        report.log(MONITOR.summary())
        self.config = self.runner.config
        self.num_blocks = self.runner.num_blocks
        self.async_scheduling = self.runner.async_scheduling

    def execute_model(
        self, scheduler_output: SchedulerOutput, bitmasks: dict[str, Tensor]
    ) -> PendingOutput:
        return self.runner.execute_model(scheduler_output, bitmasks)

    def kernels(self) -> dict[str, Any]:
        return self.selection.to_json()

    def check_alive(self) -> None:
        pass

    def shutdown(self) -> None:
        self.runner.drop_graphs()  # NCCL waits for graphs that hold its work
        world.leave()


def give_back_memory() -> None:
    """Returns what no tensor uses any more to the GPU."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def engine_layout(config: VllmConfig, rank: int) -> Layout:
    """Of rank `rank` of this engine, among all ranks that it communicates with."""
    parallel = config.parallel_config
    is_alone = not parallel.is_in_lock_step
    first = 0 if is_alone else parallel.data_parallel_rank * parallel.num_engine_ranks
    return Layout(
        rank=first + rank,
        tensor_size=parallel.tensor_parallel_size,
        pipeline_size=parallel.pipeline_parallel_size,
        data_size=1 if is_alone else parallel.data_parallel_size,
    )


def _join(config: VllmConfig, layout: Layout, rendezvous: Address, facts: Facts) -> Parallel:
    ranks, kind = config.parallel_config, facts.device.kind
    parallel = world.join(
        layout,
        ranks.enable_expert_parallel,
        rendezvous,
        kind,
        ranks.distributed_timeout_seconds,
        facts_of(config, facts),
    )
    if kind == "cuda" and parallel.tensor.size > 1:
        model = config.model_config
        size, dtype = model.hf_text_config.hidden_size, DTYPES[model.dtype]
        parallel.tensor.custom_all_reduce = make_custom_all_reduce(parallel.tensor, size, dtype)
    return parallel


def use_device(index: int, num_neighbours: int) -> None:
    """Selects GPU `index` and a share of the cores, with `num_neighbours` ranks on this node. To be
    called before the device is probed."""
    if num_neighbours > 1:
        torch.set_num_threads(max(1, torch.get_num_threads() // num_neighbours))
    if not torch.cuda.is_available():
        return
    count = torch.cuda.device_count()
    if index >= count:
        raise ConfigError(
            f"a rank needs GPU {index}, but this machine shows {count}; lower "
            f"--tensor-parallel-size, --pipeline-parallel-size or --data-parallel-size, or see "
            f"CUDA_VISIBLE_DEVICES"
        )
    torch.cuda.set_device(index)


def make_selection(config: VllmConfig, facts: Facts | None = None) -> Selection:
    """facts: None for those of this machine."""
    preferences = config.kernel_config.preferences(config.quant_config)
    model_type = config.model_config.model_type
    return selection_for(facts or probed_facts(), preferences, model_type)
