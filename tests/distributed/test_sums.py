"""Sums over tensor-parallel ranks: how many a layer needs, and who may use memory of its peers."""

import multiprocessing
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from vllm.config import CacheConfig, ModelConfig, ParallelConfig, VllmConfig
from vllm.core.outputs import SchedulerOutput
from vllm.distributed import world
from vllm.distributed.custom_all_reduce import first_obstacle
from vllm.distributed.dp_coordinator import DPCoordinator
from vllm.distributed.groups import PartialSum, add, total
from vllm.distributed.layout import Layout
from vllm.executor.uniproc import make_selection
from vllm.utils.startup import StartupReport
from vllm.worker.model_runner import ModelRunner
from vllm.worker.numerics import NumericsWatch

NUM_LAYERS = 4


@pytest.fixture(scope="module")
def on_two_ranks():
    """on_two_ranks(body, *args): what body(its Parallel, *args) returns on each."""
    with multiprocessing.get_context("spawn").Pool(2) as pool:

        def run(body, *args) -> list:
            listener = world.listen()
            address = listener.getsockname()[:2]
            store = world.host_store(listener)
            found = pool.starmap(_run, [(body, rank, address, *args) for rank in range(2)], 1)
            del store
            return found

        yield run


def _run(body, rank: int, address: tuple[str, int], *args):
    torch.set_num_threads(1)
    is_expert_parallel = args[:1] == (True,)
    layout = Layout(rank, tensor_size=2)
    parallel = world.join(layout, is_expert_parallel, address, "cpu", 60.0, {})
    try:
        return body(parallel, *args)
    finally:
        world.leave()


# ---------------------------------------------------------------- partial sums


def sums_of_sums(parallel) -> list[list[float]]:
    group = parallel.tensor

    def part(value: float) -> PartialSum:
        return group.partial(torch.full((1, 1), value + group.rank))

    whole = torch.full((1, 1), 100.0)
    # 1 + 2 = 3 and 10 + 11 = 21 over the ranks.
    results = (
        total(add(part(1.0), part(10.0))),
        total(add(part(1.0), whole.clone())),
        total(add(whole.clone(), part(10.0))),
        total(add(whole.clone(), whole)),
    )
    return [float(result) for result in results]


def test_a_partial_sum_is_added_up_once_whatever_it_is_added_to(on_two_ranks):
    assert on_two_ranks(sums_of_sums) == [[24.0, 103.0, 121.0, 200.0]] * 2


def num_sums(parallel, is_expert_parallel: bool, folder: Path) -> int:
    config = VllmConfig(
        model_config=ModelConfig.load(str(folder), dtype="float32"),
        cache_config=CacheConfig(num_blocks=100),
        parallel_config=ParallelConfig(
            tensor_parallel_size=2, enable_expert_parallel=is_expert_parallel
        ),
    )
    runner = ModelRunner(config, make_selection(config), StartupReport(), parallel)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        runner.execute_model(SchedulerOutput(), {})  # of no request: one token of padding
    return sum(event.name == "c10d::allreduce_" for event in profile.events())


@pytest.mark.parametrize(
    ("name", "is_expert_parallel"),
    [("llama", False), ("qwen3_5_moe", False), ("qwen3_5_moe", True)],
)
def test_a_layer_adds_up_once_after_attention_and_once_after_the_mlp(
    name, is_expert_parallel, checkpoint, on_two_ranks
):
    folder = checkpoint(name, num_hidden_layers=NUM_LAYERS)
    assert on_two_ranks(num_sums, is_expert_parallel, folder) == [2 * NUM_LAYERS] * 2


def test_numbers_of_a_partial_sum_are_watched():
    class Layer(torch.nn.Module):
        def forward(self, x):
            return PartialSum(x / 0 * 0 if self.is_broken else x, group=None)

    watch = NumericsWatch(layer := Layer())
    layer.is_broken = False
    layer(torch.ones(2, 2))
    assert watch.first is None
    layer.is_broken = True
    layer(torch.ones(2, 2))
    assert watch.first == "the model (Layer)"


# ---------------------------------------------------------------- agreement


def test_an_engine_may_come_later_than_a_step_may_take():
    listener = world.listen()
    address = listener.getsockname()[:2]
    stores = [world.host_store(listener), world.find_store(address)]
    timeout_s = 1.0

    def agree(rank: int):
        time.sleep(2 * timeout_s * rank)
        return DPCoordinator(stores[rank], rank, 2, timeout_s).sync(3 + rank, True, rank == 0)

    with ThreadPoolExecutor(2) as pool:
        assert [*pool.map(agree, range(2))] == [((3, 4), False)] * 2


def obstacles(parallel) -> tuple[str | None, int]:
    """What first_obstacle says where the second rank fails in the second of three steps, and how
    many steps were taken; then where none fails."""
    taken = []

    def step() -> None:
        taken.append(None)

    def fail_on_the_second() -> None:
        step()
        if parallel.tensor.rank == 1:
            raise RuntimeError("no memory\nand more")

    found = first_obstacle(parallel.tensor, (step, fail_on_the_second, step))
    num_taken = len(taken)
    assert first_obstacle(parallel.tensor, (step, step)) is None
    return found, num_taken


def test_no_rank_goes_on_alone_with_what_a_peer_cannot_do(on_two_ranks):
    assert on_two_ranks(obstacles) == [("another rank has to", 2), ("no memory", 2)]
