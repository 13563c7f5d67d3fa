"""Numbers at and beyond the ends of their ranges: an answer or a 400, never a 500."""

from typing import Any

import pytest

from .serving import RunningServer

TINY, HUGE, DENORMAL = 1e-300, 1e308, 5e-324


@pytest.mark.parametrize(
    ("fields", "status"),
    [
        ({"repetition_penalty": TINY}, 400),
        ({"repetition_penalty": 0.0099}, 400),
        ({"repetition_penalty": 0.01}, 200),
        ({"repetition_penalty": 100}, 200),
        ({"repetition_penalty": HUGE}, 400),
        ({"temperature": TINY}, 200),
        ({"temperature": DENORMAL}, 200),
        ({"temperature": 1e-5}, 200),
        ({"temperature": 1.0000001e-5, "top_k": -1}, 200),
        ({"temperature": 100}, 200),
        ({"temperature": HUGE}, 400),
        ({"temperature": -0.0}, 200),
        ({"temperature": 1e-5, "repetition_penalty": 0.01, "presence_penalty": -2}, 200),
        ({"top_p": TINY}, 200),
        ({"top_p": DENORMAL}, 200),
        ({"top_p": DENORMAL, "top_k": 2**31 - 1, "min_p": 1}, 200),
        ({"top_p": 1 - 1e-16, "temperature": 100}, 200),
        ({"min_p": TINY}, 200),
        ({"min_p": 1}, 200),
        ({"min_p": DENORMAL, "temperature": 100}, 200),
        ({"top_k": 2**31}, 400),
        ({"presence_penalty": TINY}, 200),
        ({"presence_penalty": HUGE}, 400),
        ({"frequency_penalty": -DENORMAL}, 200),
        ({"frequency_penalty": -HUGE}, 400),
        ({"seed": 2**63 - 1}, 200),
        ({"seed": -(2**63)}, 200),
        ({"seed": 2**63 - 1, "n": 3}, 200),
        ({"seed": 2**64}, 400),
        ({"logit_bias": {"5": HUGE}}, 400),
        ({"logit_bias": {"5": -HUGE}}, 400),
        ({"logit_bias": {"5": DENORMAL}}, 200),
        ({"logit_bias": {str(i): -100 for i in range(512)}}, 200),
        ({"logit_bias": {"5": 100}, "temperature": 1e-5, "repetition_penalty": 0.01}, 200),
        ({"max_tokens": 2**63}, 400),
        ({"min_tokens": 2**31}, 400),
        ({"priority": 2**31}, 400),
        ({"priority": 2**31 - 1}, 400),
        ({"truncate_prompt_tokens": 2**31 - 1}, 200),
        ({"use_beam_search": True, "n": 2, "length_penalty": HUGE}, 400),
        ({"use_beam_search": True, "n": 2, "length_penalty": -10}, 200),
        ({"logprobs": 100, "temperature": 1e-5}, 200),
        ({"allowed_token_ids": [5], "logit_bias": {"5": -100}}, 200),
    ],
    ids=repr,
)
def test_no_number_is_an_error_of_the_server(
    server: RunningServer, fields: dict[str, Any], status: int
) -> None:
    """Not greedy unless `fields` say so, and with a prompt that penalties can act on."""
    defaults = {"prompt": "ban ban fick", "max_tokens": 4, "temperature": 1.0}
    answer = server.post("/v1/completions", {**defaults, **fields})
    assert answer.status == status, answer.body[:300]
    if status == 400:
        assert next(iter(reversed(fields))) in answer.error or len(fields) > 1
    else:
        for choice in answer.json["choices"]:
            assert choice["finish_reason"] in ("stop", "length")


def test_the_accepted_range_is_told(server: RunningServer) -> None:
    answer = server.post("/v1/completions", {"prompt": "a", "repetition_penalty": TINY})
    assert answer.error == "repetition_penalty must be from 0.01 to 100, not 1e-300"
