"""Events of a stream that are written in the moment when the engine's tokens arrive."""

from collections.abc import Callable
from dataclasses import dataclass

from vllm.engine.output_processor import RequestState
from vllm.entrypoints.openai.http_protocol import Connection


@dataclass
class DirectEvents:
    """Tells the text of a stream of one choice while its generator waits for outputs: no task is
    woken for it, and no object passes through the layers of generators and of HTTP. What is not
    text alone (the first event, the end, errors) is left to the generator, and so is everything
    while the client is slow.

    event: the event with a new text, of so many tokens. connection: set when the first event was
    sent.
    """

    event: Callable[[str, int], bytes]
    connection: Connection | None = None

    def tell(self, state: RequestState) -> bool:
        """As `tell` of `EngineClient.generate`."""
        connection = self.connection
        if connection is None or not connection.is_ready:
            return False
        news = state.take_text()
        if news is None:
            return False
        connection.write(self.event(*news))
        return True
