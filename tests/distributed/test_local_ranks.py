"""Processes of ranks: where they look for modules, and that none outlives its engine."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from entrypoints.serving import wait_until
from slow import quick

from vllm import LLM, SamplingParams
from vllm.errors import ConfigError

ROOT = Path(__file__).parents[2]
# Without `if __name__ == "__main__"`.
SCRIPT = """
import sys
from vllm import LLM
LLM(sys.argv[1], tensor_parallel_size=2, skip_tokenizer_init=True)
"""
# In every rank, as if the model were large.
LOADS_FOR_EVER = """
import builtins, pathlib, sys, time
original = builtins.__import__
def importing(name, globals=None, *args, **options):
    if globals and globals.get("__name__") == "vllm.model_executor.models.decoder":
        pathlib.Path(__file__).with_name(sys.orig_argv[-1]).touch()
        time.sleep(60)
    return original(name, globals, *args, **options)
if sys.orig_argv[-1].startswith("vllm-rank"):
    builtins.__import__ = importing
"""


def start_script(folder: Path, cwd: Path) -> subprocess.Popen:
    """SCRIPT, of another folder than cwd. Python looks in cwd / "modules" for modules."""
    (cwd / "main").mkdir()
    file = cwd / "main/script.py"
    file.write_text(SCRIPT)
    paths = [str(cwd / "modules"), str(ROOT), os.environ.get("PYTHONPATH", "")]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    return subprocess.Popen([sys.executable, file, folder], cwd=cwd, env=env)


def ranks_of(pid: int) -> list[Path]:
    """What /proc says of the ranks that a process started."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            if parent == pid and b"vllm-rank" in (entry / "cmdline").read_bytes():
                found.append(entry)
        except OSError:
            continue
    return found


@pytest.mark.slow
def test_a_script_needs_no_guard_and_its_folder_hides_no_module_of_python(checkpoint, tmp_path):
    (tmp_path / "queue.py").write_text("raise RuntimeError('this is a file of the user')")
    assert start_script(checkpoint("llama"), tmp_path).wait(60) == 0


@pytest.mark.parametrize("cause", quick([signal.SIGKILL, signal.SIGINT], [signal.SIGINT]))
def test_ranks_end_with_their_engine_while_they_load(cause, checkpoint, tmp_path):
    modules = tmp_path / "modules"
    modules.mkdir()
    (modules / "sitecustomize.py").write_text(LOADS_FOR_EVER)
    engine = start_script(checkpoint("llama"), tmp_path)
    wait_until(lambda: len(list(modules.glob("vllm-rank-*"))) == 2, 30)
    ranks = ranks_of(engine.pid)
    assert len(ranks) == 2
    begin = time.monotonic()
    engine.send_signal(cause)
    assert engine.wait(20) == -cause
    wait_until(lambda: not any((rank / "cmdline").exists() for rank in ranks))
    assert time.monotonic() - begin < 10


@pytest.mark.slow
@pytest.mark.skipif(
    signal.getsignal(signal.SIGINT) is not signal.default_int_handler,
    reason="interrupts are ignored, as in a shell's background",
)
def test_an_engine_goes_on_after_ctrl_c(checkpoint):
    llm = LLM(checkpoint("llama"), tensor_parallel_size=2, skip_tokenizer_init=True)
    inputs = [{"prompt_token_ids": [3, 4, 5]}, {"prompt_token_ids": [7, 8]}]
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)

    def tokens() -> list[list[int]]:
        return [out.outputs[0].token_ids for out in llm.generate(inputs, params, use_tqdm=False)]

    wanted = tokens()
    for milliseconds in range(2, 20, 2):
        timer = threading.Timer(milliseconds / 1000, os.kill, (os.getpid(), signal.SIGINT))
        with pytest.raises(KeyboardInterrupt):
            timer.start()
            while True:
                tokens()
        assert tokens() == wanted


def test_a_refusal_leaves_no_rank_behind(checkpoint):
    with pytest.raises(ConfigError, match="num_attention_heads"):
        LLM(checkpoint("llama"), tensor_parallel_size=4, skip_tokenizer_init=True)
    assert not ranks_of(os.getpid())
