"""A child that compares kernels: one ends it, one hangs, and one computes something else."""

import os
import time

from kernel_comparisons import Outcome

from vllm.platforms.child import requests

ENDS, HANGS, WRONG = "linear/torch/bf16", "linear/torch/fp16", "linear/torch/fp32"


def serve(channel, device, libs) -> None:
    for name in requests(channel):
        if name == ENDS:
            print("an illegal memory access", flush=True)
            os.abort()
        if name == HANGS:
            time.sleep(600)
        channel.send(Outcome("wrong" if name == WRONG else "passed", f"pid {os.getpid()}"))
