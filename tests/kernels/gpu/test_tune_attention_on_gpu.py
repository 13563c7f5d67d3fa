"""`vllm kernels tune` measures attention on a GPU: Triton and FlashInfer for the same steps."""

import io

import pytest
import torch

from vllm.kernels import registry
from vllm.kernels.evidence.steps import STEPS
from vllm.kernels.evidence.tables import Table, read_table
from vllm.kernels.jit.caches import use_caches
from vllm.kernels.report import tuned_report
from vllm.kernels.select.grade import Grade
from vllm.kernels.select.policy import Policy
from vllm.kernels.select.problem import AttentionProblem
from vllm.kernels.select.reason import RANK_MEASURED
from vllm.kernels.select.select import select
from vllm.kernels.tuning.plan import plan
from vllm.kernels.tuning.progress import Progress
from vllm.kernels.tuning.tune import Limits, Run
from vllm.platforms.probe import probe_chip, probe_device, probe_libs

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]


@pytest.mark.parametrize("cache", ("bf16", "fp8"))
def test_attention_is_checked_timed_and_chosen_by(cache, tmp_path, monkeypatch):
    torch.empty(1, device="cuda")
    use_caches()
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path))  # no table or quarantine of others
    device, libs = probe_device(), probe_libs()
    problem = AttentionProblem(32, 8, 128, cache)
    jobs = plan([problem], device, libs, cache_bytes=16 << 30).jobs
    if {job.backend for job in jobs} != {"triton", "flashinfer"}:
        pytest.skip("Triton or FlashInfer cannot serve here")
    assert all(job.tokens == STEPS["cuda"] for job in jobs)
    out, path = io.StringIO(), tmp_path / "table.json"
    limits = Limits(per_kernel=60)
    run = Run(device, Table(probe_chip(), "this GPU"), path, limits, Progress(out))
    assert not run.carry_out(jobs) and not run.failures, out.getvalue()

    row = read_table(path).rows[problem.size_key]
    for backend, entry in row.items():
        assert {step for step, _ in entry.us} == set(STEPS["cuda"])
        us = dict(entry.us)
        # 8 KiB of keys and values for each key of a bf16 cache: less than 8 TB/s.
        read = 256 * 8192 * problem.num_kv_heads * problem.head_dim * (2 if cache == "fp8" else 4)
        assert us["decode 256x8192"] > read / 8e6, (backend, us)
        assert us["decode 1x1024"] < us["decode 64x1024"] < us["decode 256x8192"]
        assert us["prompt 512"] < us["prompt 4096"]
    timings = read_table(path).timings(problem)
    specs = registry.specs("attention", device.family)
    decision = select(problem, device, libs, Policy(), specs, evidence=timings)
    assert decision.origin.rank == RANK_MEASURED and decision.winner.grade is Grade.MEASURED
    print(tuned_report.page(read_table(path), [(decision, "triton")]))
