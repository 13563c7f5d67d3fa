"""Measures the kernels of a layer on this machine, and shows what that changes about the choice.

    python examples/tune_on_cpu.py [LAYER]

LAYER: FORMAT:NxK, fp8-block:512x512 without it. The table goes to a folder that is removed; `vllm
kernels tune MODEL` keeps one for later starts.
"""

import os
import subprocess
import sys
import tempfile


def kernels(folder: str, *words: str) -> str:
    """What `vllm kernels` prints, with its measurements in `folder`."""
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "kernels", *words]
    env = {**os.environ, "VLLM_CACHE_ROOT": folder}
    return subprocess.run(command, env=env, check=True, stdout=subprocess.PIPE, text=True).stdout


def main(layer: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        print(kernels(folder, "explain", "--layer", layer, "--brief"))
        print(kernels(folder, "tune", "--layer", layer, "--tokens", "1,64",
                      "--seconds-per-kernel", "1"))  # fmt: skip
        print(kernels(folder, "explain", "--layer", layer, "--brief"))


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "fp8-block:512x512")
