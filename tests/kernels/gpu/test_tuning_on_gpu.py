"""The tuner checks and times every kernel of small problems on this GPU."""

import pytest
import torch

from vllm.formats.act_scheme import ActScheme
from vllm.formats.weight_format import WeightFormat
from vllm.kernels.jit.caches import use_caches
from vllm.kernels.select.problem import LinearProblem, MoEProblem
from vllm.kernels.tuning import trials
from vllm.kernels.tuning.jobs import Turns
from vllm.kernels.tuning.plan import plan
from vllm.platforms.probe import probe_device, probe_libs

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
TOKENS = (1, 64, 512)
FP8, ACT = WeightFormat.parse("fp8-block"), (ActScheme.DYNAMIC_GROUP128, ActScheme.NONE)
PROBLEMS = {
    "linear": LinearProblem(512, 1024, FP8, ACT),
    "linear with partial blocks": LinearProblem(192, 1024, FP8, ACT, parts=(96, 96), cut_n=4),
    "experts": MoEProblem(16, 4, 1024, 256, FP8, ACT),
    "experts over two ranks": MoEProblem(16, 4, 1024, 256, FP8, ACT, cut_experts=2),
    "experts with partial blocks": MoEProblem(16, 4, 1024, 96, FP8, ACT, cut=4),
}


@pytest.mark.parametrize("name", PROBLEMS)
def test_every_kernel_of_a_problem_is_checked_and_timed_in_turns(name):
    use_caches()
    problem, device = PROBLEMS[name], torch.device("cuda")
    planned = plan([problem], probe_device(), probe_libs(), TOKENS).jobs
    jobs = tuple(job for job in planned if job.backend != "humming")  # it compiles for minutes
    if not jobs:
        pytest.skip("no two kernels here can run it")
    with torch.inference_mode():
        for job in jobs:
            errors = [error for _, error in trials.checked(job, device) if error is not None]
            assert len(errors) == len(job.gate) and max(errors) < 0.05, str(job)
        steps = list(trials.timed(Turns(jobs, 60.0), device))
    found = [(m, one) for m, one in steps if one is not None]
    assert {(m, one.backend) for m, one in found} == {
        (m, job.backend) for job in jobs for m in job.tokens
    }
    for num_tokens, one in found:
        assert ("skewed_us" in one.us) == isinstance(problem, MoEProblem)
        assert all(0.5 < us < 1e6 for us in one.us.values()) and 0 <= one.noise < 1
        print(num_tokens, one)
