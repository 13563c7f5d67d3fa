"""What a running server thinks of texts, token by token."""

import asyncio
from collections.abc import Sequence
from typing import Any

from vllm.evals.gsm8k import Server
from vllm.evals.paired import Position
from vllm.utils.http_client import HttpClient

_CONCURRENCY = 16


def positions(
    server: Server, texts: Sequence[Sequence[int]], num_logprobs: int = 32
) -> list[Position]:
    """Of every token but the first of each text, in order. Needs a server that returns
    `prompt_logprobs` for token ids; HttpError where it does not answer."""
    return asyncio.run(_positions(server, texts, num_logprobs))


async def _positions(
    server: Server, texts: Sequence[Sequence[int]], num_logprobs: int
) -> list[Position]:
    fields: dict[str, Any] = {"max_tokens": 1, "temperature": 0, "prompt_logprobs": num_logprobs}
    if server.model:
        fields["model"] = server.model
    places = asyncio.Semaphore(_CONCURRENCY)

    async def score(client: HttpClient, ids: Sequence[int]) -> list[Position]:
        async with places:
            reply = await client.post_json("/v1/completions", {"prompt": list(ids), **fields})
        return _of_text(ids, reply["choices"][0]["prompt_logprobs"])

    async with HttpClient(server.base_url, server.api_key) as client:
        found = await asyncio.gather(*(score(client, ids) for ids in texts))
    return [position for text in found for position in text]


def _of_text(ids: Sequence[int], places: Sequence[dict[str, Any] | None]) -> list[Position]:
    """`places`: by token id, as texts; None for the first token."""
    found = []
    for token, place in zip(ids, places, strict=True):
        if place is not None:
            likeliest = {int(other): float(entry["logprob"]) for other, entry in place.items()}
            found.append(Position(token, likeliest[token], likeliest))
    return found
