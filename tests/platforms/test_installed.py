"""Machines with a GPU in the eyes of the driver: a stand-in for it, built here."""

import os
import subprocess
import sys

import pytest
import torch

DRIVER = """
#include <stddef.h>
int cuInit(unsigned flags) { return 0; }
int cuDeviceGet(int* device, int ordinal) { *device = ordinal; return 0; }
int cuDeviceTotalMem_v2(size_t* bytes, int device) { *bytes = (size_t)80 << 30; return 0; }
int cuDeviceGetAttribute(int* value, int number, int device) {
  *value = number == 75 ? 9 : number == 16 ? 132 : number == 36 ? 2619000 : number == 37 ? 5120 : 0;
  return 0;
}
"""


@pytest.fixture(scope="module")
def driver(tmp_path_factory):
    folder = tmp_path_factory.mktemp("driver")
    (folder / "driver.c").write_text(DRIVER)
    library = folder / "libcuda.so.1"
    compiler = os.environ.get("CC", "cc")
    subprocess.run([compiler, "-shared", "-fPIC", folder / "driver.c", "-o", library], check=True)
    return folder


def run(driver, code: str, *paths) -> subprocess.CompletedProcess:
    path = os.pathsep.join(filter(None, (*map(str, paths), os.environ.get("PYTHONPATH", ""))))
    env = {**os.environ, "LD_LIBRARY_PATH": str(driver), "PYTHONPATH": path}
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env)


@pytest.mark.slow
@pytest.mark.skipif(torch.version.cuda is not None, reason="this torch is not for CPUs")
def test_a_torch_for_cpus_serves_on_the_cpu_and_says_that_there_is_a_gpu(driver):
    code = (
        "from vllm.utils.import_utils import hide_torch\n"
        "hide_torch()\n"  # as a server's first process does
        "from vllm.platforms.installed import gpu_memory_bytes, installed_device, visible_gpu\n"
        "kind = installed_device().kind\n"
        "import sys; del sys.modules['torch']\n"
        "from vllm.platforms.probe import probe_device\n"
        "print(kind, visible_gpu(), gpu_memory_bytes() >> 30)\n"
        "print(probe_device().kind)"
    )
    done = run(driver, code)
    assert done.stdout.split() == ["cpu", "cuda:sm_90", "80", "cpu"], done.stderr
    assert "built for CPUs" in done.stderr and "cuda:sm_90" in done.stderr


def test_a_gpu_that_torch_with_cuda_cannot_use_is_an_error_that_says_what_to_do(driver, tmp_path):
    """By a torch that claims to be of another build."""
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "version.py").write_text("cuda: Optional[str] = '13.0'\n")
    (tmp_path / "torch" / "__init__.py").write_text(
        "class version: cuda = '13.0'\n"
        "class cuda:\n"
        "    is_available = staticmethod(lambda: False)\n"
        "    @staticmethod\n"
        "    def init(): raise RuntimeError('The NVIDIA driver on your system is too old')\n"
        "__version__ = '2.13.0'\n"
    )
    code = (
        "from vllm.platforms.installed import installed_device\n"
        "print(installed_device())\n"
        "from vllm.platforms.probe import probe_device\n"
        "probe_device()"
    )
    done = run(driver, code, tmp_path)
    assert done.stdout.split() == ["cuda:sm_90"], done.stderr
    error = done.stderr.splitlines()[-1]
    assert "ConfigError" in error and "driver on your system is too old" in error
    assert "CUDA_VISIBLE_DEVICES=" in error and "2.13.0 with CUDA 13.0" in error


@pytest.mark.slow
@pytest.mark.parametrize("isa", [None, "portable"])
def test_the_instruction_set_is_known_without_torch(isa):
    code = (
        "import sys\n"
        "from vllm.platforms.installed import installed_device\n"
        "device = installed_device()\n"
        "assert 'torch' not in sys.modules\n"
        "from vllm.platforms.probe import probe_device\n"
        "assert probe_device() == device, (probe_device(), device)\n"
        "print(device)"
    )
    env = {**os.environ, **({"VLLM_CPU_ISA": isa} if isa else {}), "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env)
    assert done.stdout.startswith(f"cpu:{isa or ''}"), done.stderr
