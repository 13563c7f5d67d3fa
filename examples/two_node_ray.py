"""One model over two machines of a Ray cluster: each holds half of every layer.

On the first machine, then on the second, then on either of them:

    ray start --head
    ray start --address=FIRST_MACHINE:6379
    python examples/two_node_ray.py MODEL

On one machine, with a cluster that is simulated:

    python examples/two_node_ray.py --simulate MODEL

MODEL: a folder that both machines have, or a name on the Hugging Face hub. Needs Ray:
pip install 'vllm[ray]'. `vllm serve MODEL -tp 2 --distributed-executor-backend ray` serves so.
"""

import argparse
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

from vllm import LLM, SamplingParams


@contextmanager
def simulated_cluster() -> Iterator[None]:
    """Two nodes with one processor each, as processes of this machine."""
    import ray
    from ray.cluster_utils import Cluster

    head = {"num_cpus": 1, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    cluster.add_node(num_cpus=1)
    ray.init(address=cluster.address, log_to_driver=False)
    try:
        yield
    finally:
        ray.shutdown()
        cluster.shutdown()


def main(model: str) -> None:
    llm = LLM(model, tensor_parallel_size=2, distributed_executor_backend="ray", max_model_len=512)
    output = llm.generate("The capital of France is", SamplingParams(temperature=0, max_tokens=16))
    print(output[0].outputs[0].text)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="One model over two machines.")
    parser.add_argument("model", metavar="MODEL")
    parser.add_argument("--simulate", action="store_true", help="Both on this machine.")
    args = parser.parse_args()
    with simulated_cluster() if args.simulate else nullcontext():
        main(args.model)
