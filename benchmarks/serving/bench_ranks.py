"""What it costs to tell ranks of a step and to get the answer, without what they compute.

    python benchmarks/serving/bench_ranks.py

Real messages over the connections that `--distributed-executor-backend mp` uses; a rank answers at
once. Prints the least, median and 90th percentile in microseconds.
"""

import pickle
import socket
import subprocess
import sys
import time
from multiprocessing.connection import Connection, wait

from vllm.core.outputs import ModelRunnerOutput, SchedulerOutput
from vllm.executor.messages import ExecuteModel, Stop

NUM_STEPS = 600


def rank(descriptor: int, answers: bool) -> None:
    connection = Connection(descriptor)
    connection.send("ready")
    while not isinstance(message := connection.recv(), Stop):
        if answers:
            ids = [*message.scheduler_output.num_scheduled_tokens]
            connection.send(ModelRunnerOutput(ids, [[5] for _ in ids]))


def start(index: int) -> Connection:
    ours, theirs = socket.socketpair()
    with theirs:
        descriptor = theirs.fileno()
        words = [sys.executable, __file__, str(descriptor), str(int(index == 0))]
        subprocess.Popen(words, pass_fds=(descriptor,))
    return Connection(ours.detach())


def microseconds(connections: list[Connection], num_requests: int) -> list[float]:
    step = SchedulerOutput(num_scheduled_tokens={f"cmpl-{i:032x}": 1 for i in range(num_requests)})
    times = []
    for _ in range(NUM_STEPS):
        begin = time.perf_counter()
        data = pickle.dumps(ExecuteModel(step, {}), pickle.HIGHEST_PROTOCOL)
        for connection in connections:
            connection.send_bytes(data)
        wait(connections, 10)
        connections[0].recv()
        times.append((time.perf_counter() - begin) * 1e6)
    return sorted(times)


def main() -> None:
    for num_ranks in (1, 2, 4):
        connections = [start(index) for index in range(num_ranks)]
        for connection in connections:
            connection.recv()
        for num_requests in (1, 32, 256):
            times = microseconds(connections, num_requests)
            shown = (times[0], times[len(times) // 2], times[len(times) * 9 // 10])
            print(
                f"{num_ranks} ranks, {num_requests:3} requests: "
                "least {:.0f}, median {:.0f}, 90 % {:.0f} us".format(*shown)
            )
        for connection in connections:
            connection.send(Stop())


if __name__ == "__main__":
    if len(sys.argv) == 3:
        rank(int(sys.argv[1]), sys.argv[2] == "1")
    else:
        main()
