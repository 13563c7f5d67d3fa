"""Draft tokens that the host does not know when it lays out the step that verifies them."""

import numpy as np
import pytest
import torch
from mtp_checkpoints import add_mtp

from vllm import LLM, SamplingParams
from vllm.core import speculation
from vllm.core.outputs import SchedulerOutput
from vllm.core.request import EngineRequest, Request
from vllm.core.speculation import drop_waiting_drafts
from vllm.worker.drafts import LATER, DraftsInFlight
from vllm.worker.mtp import StepTokens, _until

TOKENS = torch.tensor([40, 41, 42, 43, 44, 45])
# Of three, two and one draft tokens: the first of each, then the second, then the third.
PLACES = {"a": [0, 3, 5], "b": [1, 4], "c": [2]}


@pytest.fixture(autouse=True)
def drafts_always(monkeypatch):
    monkeypatch.setattr(speculation, "_FIRST_STEPS", 1 << 30)


def in_flight() -> DraftsInFlight:
    return DraftsInFlight(TOKENS, TOKENS.clone(), None, PLACES)


def test_late_tokens_are_put_where_their_requests_have_them():
    """Of requests in any order, cut, and beside one whose drafts are known."""
    drafts = {"c": [LATER], "a": [LATER] * 2, "k": [7, 8]}
    last = {"c": 1, "x": 2, "a": 5, "k": 8}
    late = in_flight().late(drafts, last)
    input_ids = torch.arange(9)
    late.put_into(input_ids)
    assert input_ids.tolist() == [0, 42, 2, 3, 40, 43, 6, 7, 8]
    ahead = torch.arange(9)
    late.put_into(ahead, 1)
    assert ahead.tolist() == [42, 1, 2, 40, 43, 5, 6, 7, 8]
    known = in_flight().resolved(drafts)
    assert known == {"c": [42], "a": [40, 43], "k": [7, 8]}
    assert in_flight().late({"k": [7, 8]}, last) is None


@pytest.mark.parametrize("cut", [0, 1, 2, 3])
def test_late_tokens_follow_those_of_a_step_that_is_cut(cut):
    """Of two requests of a known token and two drafts each, the first up to `cut` tokens."""
    counts, starts = np.array([3, 3]), np.array([10, 20])
    drafts, last = {"a": [LATER] * 2, "b": [LATER] * 2}, {"a": 2, "b": 5}
    hidden = torch.arange(6.0)[:, None]
    step = StepTokens(
        np.array([0, 1]), counts, starts, hidden, None, in_flight().late(drafts, last)
    )
    own = _until(step, np.array([10 + cut, 23]))
    # What follows each token of the step: its drafts, then a new one.
    wanted = [*[40, 43, -1][:cut], 41, 44, -1]
    found = torch.full((len(wanted),), -1)
    own.late.put_into(found, 1)
    assert found.tolist() == wanted and len(own.hidden) == len(wanted)


def test_drafts_of_a_request_that_is_not_in_the_step_are_dropped():
    def request(name: str, num_pending: int) -> Request:
        wire = EngineRequest(name, [1, 2, 3], SamplingParams(), 0, [], 9)
        made = Request.of(wire)
        made.spec_token_ids, made.num_pending_tokens = [LATER], num_pending
        return made

    computed, waits, verified = request("computed", 1), request("waits", 0), request("verified", 1)
    drop_waiting_drafts([computed, waits, verified], SchedulerOutput([], {"computed": 2}))
    assert computed.spec_token_ids and verified.spec_token_ids and not waits.spec_token_ids


@pytest.mark.parametrize(
    ("options", "is_late"),
    [
        ({}, True),
        ({"min_tokens": 5}, True),
        ({"logprobs": 2}, True),
        ({"frequency_penalty": 0.4}, False),
    ],
    ids=str,
)
def test_requests_that_read_their_own_tokens_wait_for_drafts(
    checkpoint, tmp_path, options, is_late
):
    folder = add_mtp(checkpoint("glm4_moe"), tmp_path / "mtp", True)
    llm = LLM(
        folder, max_model_len=96, max_num_seqs=4, num_gpu_blocks_override=64,
        speculative_config={"method": "mtp", "num_speculative_tokens": 2},
        skip_tokenizer_init=True,
    )  # fmt: skip
    drafts = []
    core = llm.llm_engine.core
    core.on_scheduled = lambda step: drafts.extend(step.scheduled_spec_decode_tokens.values())
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, **options)
    llm.generate([{"prompt_token_ids": [5, 6, 7]}], params, use_tqdm=False)
    assert len(drafts) > 3
    assert all(all(token == LATER for token in draft) == is_late for draft in drafts)
