"""Time of one scheduler step (schedule and update) with many running requests; no model, no torch.

usage: python benchmarks/serving/bench_scheduler.py [--num-requests 256] [--steps 300]
"""

import argparse
import statistics
import time

from vllm.config import SchedulerConfig
from vllm.core.outputs import ModelRunnerOutput
from vllm.core.request import EngineRequest, Request
from vllm.core.scheduler import Scheduler
from vllm.sampling_params import SamplingParams

BLOCK_SIZE = 16
PROMPT_LENGTH = 200


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--num-requests", type=int, default=256)
    parser.add_argument("--steps", type=int, default=300)
    args = parser.parse_args()
    max_len = PROMPT_LENGTH + args.steps + 1
    num_blocks = args.num_requests * (max_len // BLOCK_SIZE + 1)
    config = SchedulerConfig(args.num_requests, max(8192, args.num_requests))
    scheduler = Scheduler(config, num_blocks, BLOCK_SIZE, max_len, prefix_caching=True)
    for number in range(args.num_requests):
        prompt = [(number * 7 + i) % 5000 for i in range(PROMPT_LENGTH)]
        params = SamplingParams(max_tokens=args.steps)
        wire = EngineRequest(str(number), prompt, params, number, [1], args.steps)
        scheduler.add(Request.of(wire))
    times = []
    while scheduler.has_requests:
        start = time.perf_counter()
        step = scheduler.schedule()
        decided = time.perf_counter()
        sampled = [
            request_id
            for request_id, count in step.num_scheduled_tokens.items()
            if scheduler.requests[request_id].num_computed_tokens + count
            == len(scheduler.requests[request_id].all_token_ids)
        ]
        output = ModelRunnerOutput(sampled, [[7] for _ in sampled])
        resumed = time.perf_counter()
        scheduler.update(step, output)
        if len(sampled) == args.num_requests:
            times.append(decided - start + time.perf_counter() - resumed)
    times.sort()
    print(
        f"{args.num_requests} running requests, {len(times)} decode steps: "
        f"median {statistics.median(times) * 1e3:.3f} ms, "
        f"p99 {times[int(0.99 * len(times)) - 1] * 1e3:.3f} ms a step"
    )


if __name__ == "__main__":
    main()
