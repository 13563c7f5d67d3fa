"""What a client asks of its engines beside requests."""

from typing import Any

from vllm.engine.input_processor import refuse_lora
from vllm.errors import RequestError
from vllm.lora.request import LoRARequest


class EngineCalls:
    """is_asleep: after `sleep`, until `wake_up`. is_dead: for good, with a reason."""

    def __init__(self) -> None:
        self.is_asleep = False
        self.is_dead = False
        self.dead_reason = ""

    @property
    def is_running(self) -> bool:
        return not self.is_dead

    @property
    def is_stopped(self) -> bool:
        return self.is_dead

    async def is_tracing_enabled(self) -> bool:
        """Whether requests are traced, and `trace_headers` of them count."""
        return False

    async def do_log_stats(self) -> None:
        """Nothing is logged: statistics are in `metrics`."""

    async def call_engines(self, method: str, *arguments: Any) -> list[Any]:
        """What `method` of every engine core returns; RequestError for what it refuses."""
        raise NotImplementedError

    async def reset_prefix_cache(self) -> bool:
        """Later requests compute their prompts anew."""
        return all(await self.call_engines("reset_prefix_cache"))

    async def sleep(self, level: int = 1) -> None:
        """Frees weights and KV cache until `wake_up`; RequestError while there are requests."""
        await self.call_engines("sleep", level)
        self.is_asleep = True

    async def wake_up(self, tags: list[str] | None = None) -> None:
        """Loads the model again, from the same checkpoint, whatever `tags` names."""
        await self.call_engines("wake_up")
        self.is_asleep = False

    async def is_sleeping(self) -> bool:
        return self.is_asleep

    async def start_profile(self) -> None:
        """Traces the engines until `stop_profile`, into VLLM_TORCH_PROFILER_DIR."""
        await self.call_engines("start_profile")

    async def stop_profile(self) -> None:
        await self.call_engines("stop_profile")

    async def encode(self, *arguments: Any, **keywords: Any) -> None:
        """Refused: RequestError."""
        raise RequestError("this is not a pooling model: it generates text and gives no vectors")

    async def add_lora(self, lora_request: LoRARequest) -> bool:
        """Refused: RequestError."""
        refuse_lora(lora_request)
        return False
