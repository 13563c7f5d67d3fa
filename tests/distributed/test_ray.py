"""Ranks on two nodes of a Ray cluster, which is simulated on this machine."""

import os

import pytest

from vllm import LLM, SamplingParams, envs
from vllm.errors import ConfigError, EngineDeadError
from vllm.executor.ray import _connect

ray = pytest.importorskip("ray", reason="Ray is not installed: pip install 'vllm[ray]'")

PARAMS = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
PROMPTS = [{"prompt_token_ids": [(7 * i + n) % 90 + 3 for i in range(n)]} for n in (3, 40)]


@pytest.fixture(scope="module")
def cluster():
    from ray.cluster_utils import Cluster

    started = Cluster(
        initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False}
    )
    started.add_node(num_cpus=1)
    ray.init(address=started.address, log_to_driver=False)
    yield started
    ray.shutdown()
    started.shutdown()


def tokens(llm: LLM) -> list[list[int]]:
    return [o.outputs[0].token_ids for o in llm.generate(PROMPTS, PARAMS, use_tqdm=False)]


def load(folder, **options) -> LLM:
    return LLM(folder, skip_tokenizer_init=True, max_num_seqs=4, **options)


def test_a_cluster_that_does_not_answer_is_told_of_at_once(monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    with pytest.raises(ConfigError, match=r"RAY_ADDRESS=127.0.0.1:1: nobody answers .*ray start"):
        _connect(ray, 1)


def test_ray_and_its_actors_get_no_secret(monkeypatch):
    class Started:
        def init(self, **options):
            self.environment = dict(os.environ)

    for name in envs.SECRETS:
        monkeypatch.setenv(name, "hunter2")
    monkeypatch.setenv("RAY_ADDRESS", "")
    started = Started()
    _connect(started, 1)
    assert "hunter2" not in started.environment.values()
    assert os.environ["HF_TOKEN"] == "hunter2"
    assert "hunter2" not in envs.texts().values()


def test_several_engines_do_not_start_a_cluster_each():
    class NoCluster:
        def init(self, **options):
            assert options["address"] == "auto", "it would start one"
            raise ConnectionError("Could not find any running Ray instance.")

    with pytest.raises(ConfigError, match=r"--data-parallel-size 2: .*ray start --head"):
        _connect(NoCluster(), 2)


@pytest.mark.slow
def test_two_nodes_give_the_tokens_of_one_rank_until_one_is_killed(checkpoint, cluster):
    folder = checkpoint("llama")
    llm = load(folder, tensor_parallel_size=2, distributed_executor_backend="ray")
    assert tokens(llm) == tokens(load(folder))
    executor = llm.llm_engine.core.executor
    table = ray.util.placement_group_table(executor._launcher._group)
    assert len(set(table["bundles_to_node_id"].values())) == 2
    ray.kill(executor._handles[1].process._actor)
    with pytest.raises(EngineDeadError, match=r"rank 1 \(tensor-parallel 1\): .*actor"):
        tokens(llm)


@pytest.mark.slow
def test_more_ranks_than_the_cluster_has_are_refused(checkpoint, cluster):
    with pytest.raises(ConfigError, match=r"the cluster has 2 CPUs, but .* make 3 ranks"):
        load(checkpoint("llama"), pipeline_parallel_size=3, distributed_executor_backend="ray")
