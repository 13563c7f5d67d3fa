"""Programs of the build: those of this Python's environment first, then those on PATH."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ASKING = ("TORCH_CUDA_ARCH_LIST", "CUDAARCHS", "CUDACXX", "CUDA_HOME", "CUDA_PATH")


def find_tool(name: str) -> str | None:
    """Its path, or None. NVIDIA's wheels keep their programs beside their modules."""
    wheels = [str(path) for folder in sys.path for path in Path(folder).glob("nvidia/cu*/bin")]
    folders = [str(Path(sys.executable).parent), *os.get_exec_path(), *wheels]
    return shutil.which(name, path=os.pathsep.join(folders))


def output_of(*command: str | Path) -> str:
    """What a command prints; an assertion with all of it if the command fails."""
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert done.returncode == 0, f"{' '.join(map(str, command))}\n{done.stdout}"
    return done.stdout


class Configured:
    """This tree, configured into `folder`: whether that worked, what it said and recorded.

    Only `options` and `variables` ask for architectures; those of the environment are taken out.
    """

    def __init__(self, folder: Path, *options: str, **variables: str):
        environment = {k: v for k, v in os.environ.items() if k not in ASKING} | variables
        python = f"-DPython_EXECUTABLE={find_tool('python')}"
        output = f"-DVLLM_OUTPUT_DIR={folder / 'lib'}"
        ninja = f"-DCMAKE_MAKE_PROGRAM={find_tool('ninja')}"
        commands = "-DCMAKE_EXPORT_COMPILE_COMMANDS=ON"
        start = [find_tool("cmake"), "-S", ROOT, "-B", folder, "-G", "Ninja"]
        done = subprocess.run(
            [*start, python, output, ninja, commands, *options],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.succeeded = done.returncode == 0
        self.text = done.stdout
        self.folder = folder

    @property
    def manifest(self) -> dict:
        return json.loads((self.folder / "arch_manifest.json").read_text())

    def nvcc_flags(self, source: str) -> list[str]:
        compiled = json.loads((self.folder / "compile_commands.json").read_text())
        [command] = [entry["command"] for entry in compiled if entry["file"].endswith(source)]
        return [word for word in command.split() if word.startswith("-gencode")]
