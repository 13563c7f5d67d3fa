"""A LoRA adapter as a request names it. None can be served: a request with one is refused."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LoRARequest:
    """An adapter's name, its number in the engine and its folder."""

    lora_name: str
    lora_int_id: int
    lora_path: str = ""
    base_model_name: str | None = None
