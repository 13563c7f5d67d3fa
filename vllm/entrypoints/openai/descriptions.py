"""What `/openapi.json` and `/docs` say of each path: a sentence, and an example of a body."""

from typing import Any

from fastapi import FastAPI
from fastapi.routing import APIRoute

from vllm.entrypoints.openai.management import POOLING_PATHS

_USER = {"role": "user", "content": "Why is the sky blue?"}

ABOUT = {
    "POST /v1/completions": "Continues one or many prompts, given as text or token ids.",
    "POST /v1/chat/completions": "Answers a conversation, with the model's chat template.",
    "POST /v1/responses": "Answers in the form of OpenAI's Responses.",
    "POST /v1/responses/input_tokens": "The number of prompt tokens of such a request.",
    "GET /v1/responses/{response_id}": "A stored response.",
    "DELETE /v1/responses/{response_id}": "Deletes a stored response.",
    "POST /v1/responses/{response_id}/cancel": "Refused: a stored response has ended.",
    "GET /v1/responses/{response_id}/input_items": "The items that a stored response answers.",
    "POST /v1/messages": "Answers in the form of Anthropic's Messages.",
    "POST /v1/messages/count_tokens": "The number of prompt tokens of such a request.",
    "GET /v1/models": "The served names and the maximum length.",
    "GET /v1/models/{name}": "One served name.",
    "POST /tokenize": "Token ids of a text or a conversation.",
    "POST /detokenize": "Text of token ids.",
    "GET /kernels": "The kernel decisions in force: a page in a browser, else JSON.",
    "GET /metrics": "Metrics in Prometheus' text format.",
    "GET /version": "The version of this package.",
    "GET /load": "Requests being answered.",
    "GET /tokenizer_info": "The tokenizer's settings and its chat template.",
    "GET /server_info": "The resolved configuration.",
    "GET /is_sleeping": "Whether weights and KV cache are freed.",
    "POST /reset_prefix_cache": "Forgets all cached prefixes.",
    "POST /sleep": "Frees weights and KV cache.",
    "POST /wake_up": "Loads again what /sleep freed.",
    "POST /start_profile": "Begins a trace of torch's profiler.",
    "POST /stop_profile": "Ends the trace and writes it.",
    **{
        f"POST {path}": "Refused: the model generates text and gives no vectors or scores."
        for path in POOLING_PATHS
    },
}
"""By method and path."""

EXAMPLES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "The capital of France is", "max_tokens": 16, "temperature": 0},
    "/v1/chat/completions": {"messages": [_USER], "max_tokens": 64, "stream": True},
    "/v1/responses": {"input": "Why is the sky blue?", "max_output_tokens": 64},
    "/v1/responses/input_tokens": {"input": "Why is the sky blue?"},
    "/v1/messages": {"model": "MODEL", "messages": [_USER], "max_tokens": 64},
    "/v1/messages/count_tokens": {"model": "MODEL", "messages": [_USER]},
    "/tokenize": {"prompt": "Hello"},
    "/detokenize": {"tokens": [1, 2, 3]},
}
"""Bodies of POST, by path."""


def describe_paths(app: FastAPI, model_name: str) -> None:
    """Describes all paths that `app` has by now. model_name: for examples that need one."""
    for route in app.routes:
        if not isinstance(route, APIRoute) or not route.include_in_schema:
            continue
        for method in route.methods or ():
            route.description = ABOUT[f"{method} {route.path_format}"]
        if (example := EXAMPLES.get(route.path)) is not None:
            named = example | ({"model": model_name} if "model" in example else {})
            assert route.openapi_extra is not None
            content = route.openapi_extra["requestBody"]["content"]["application/json"]
            content["example"] = named
