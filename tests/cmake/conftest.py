import pytest
from build_tools import find_tool


@pytest.fixture(scope="session")
def nvcc() -> str:
    path = find_tool("nvcc")
    if path is None:
        pytest.skip("nvcc is neither on PATH nor in an nvidia-cuda-nvcc wheel")
    return path


@pytest.fixture(scope="session")
def nvdisasm() -> str:
    path = find_tool("nvdisasm")
    if path is None:
        pytest.skip("nvdisasm is neither on PATH nor in an nvidia-cuda-nvdisasm wheel")
    return path


@pytest.fixture(scope="session")
def cuobjdump(nvdisasm) -> str:
    """It disassembles with the nvdisasm of PATH or of its own folder."""
    path = find_tool("cuobjdump")
    if path is None:
        pytest.skip("cuobjdump is neither on PATH nor in an nvidia-cuda-cuobjdump wheel")
    return path
