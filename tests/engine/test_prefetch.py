"""What is done beside imports: it is there when the engine asks, and says nothing when it fails."""

import os
import threading

import pytest

from vllm.engine.arg_utils import EngineArgs
from vllm.engine.early_start import started_early
from vllm.executor import prefetch

SIZE = prefetch._CHUNK_BYTES + 4096


def is_cached(file, offset):
    with open(file, "rb") as opened:
        return prefetch._is_cached(opened.fileno(), offset)


@pytest.fixture
def weights(tmp_path):
    """A file of weights that is on the disk alone."""
    file = tmp_path / "model.safetensors"
    with open(file, "wb") as opened:
        opened.write(bytes(SIZE))
        opened.flush()
        os.fsync(opened.fileno())
        os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    if is_cached(file, SIZE // 2):
        pytest.skip("this file system keeps what it was asked to forget")
    return file


def test_weights_are_in_memory_after_reading_ahead(weights):
    for _ in range(5):  # the kernel may have taken the memory back
        prefetch.read_ahead(weights.parent)
        if all(is_cached(weights, offset) for offset in (0, SIZE // 2, SIZE - 1)):
            return
    pytest.fail("weights that were read are not in memory")


def test_weights_that_memory_does_not_hold_are_left_on_the_disk(weights, monkeypatch):
    monkeypatch.setattr(prefetch, "available_memory", lambda: 0)
    prefetch.read_ahead(weights.parent)
    assert not is_cached(weights, SIZE - 1)


def test_an_engine_waits_for_all_that_it_would_do_again(tmp_path, capfd):
    with started_early(EngineArgs(model=str(tmp_path / "nothing here"))):
        prefetch.finish()
    running = {thread.name for thread in threading.enumerate()}
    assert not running & {"start-wake_gpu", "start-_try_libraries"}
    assert capfd.readouterr() == ("", "")


def test_ranks_take_their_gpus_themselves(tmp_path):
    with started_early(EngineArgs(model=str(tmp_path), tensor_parallel_size=2)):
        assert prefetch._awaited == []
