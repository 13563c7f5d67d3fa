"""Steps of requests that attention is timed for, by the names that tables file times under."""

import re
from collections.abc import Iterable

from vllm.kernels.select.problem import AttentionProblem
from vllm.kernels.step_bytes import key_bytes
from vllm.utils.dataclasses import dataclass, replace

_NAME = r"[a-z]+ (?:(\d+)(?:\+|$))?(?:(\d+)x(\d+))?"  # prompt, decodes, context


@dataclass(frozen=True)
class Step:
    """prompt: tokens of a whole prompt, 0 for none. decodes: requests with one new token each.
    context: keys of each of those, the new one included."""

    prompt: int = 0
    decodes: int = 0
    context: int = 0

    @classmethod
    def parse(cls, name: str) -> "Step":
        """From `decode 16x1024`, `prompt 512` or `mixed 512+32x1024`; ValueError for any other."""
        match = re.fullmatch(_NAME, name, re.ASCII)
        step = cls(*(int(number or 0) for number in match.groups())) if match else cls()
        if not step.num_tokens or step.name != name or (step.decodes and not step.context):
            raise ValueError(
                f"{name!r} is no step: it takes decode REQUESTSxKEYS, prompt TOKENS or mixed "
                f"TOKENS+REQUESTSxKEYS"
            )
        return step

    @property
    def name(self) -> str:
        decodes = f"{self.decodes}x{self.context}"
        if not self.prompt:
            return f"decode {decodes}"
        return f"mixed {self.prompt}+{decodes}" if self.decodes else f"prompt {self.prompt}"

    @property
    def num_tokens(self) -> int:
        return self.prompt + self.decodes

    @property
    def num_keys(self) -> int:
        return self.prompt + self.decodes * self.context

    @property
    def requests(self) -> list[tuple[int, int]]:
        """(new tokens, keys) of each: a prompt comes first."""
        prompt = [(self.prompt, self.prompt)] if self.prompt else []
        return prompt + [(1, self.context)] * self.decodes

    @property
    def place(self) -> tuple[int, int]:
        """In the order of tables."""
        return self.num_tokens, self.num_keys

    def bytes_of_cache(self, problem: AttentionProblem) -> int:
        """Of the keys and values of one layer."""
        return self.num_keys * key_bytes(problem)


# By kind of device, in order of importance: where time is limited, MAIN_STEPS are measured before
# anything else. Of steps on a GPU most are decodes, as of its time.
STEPS = {
    "cuda": (
        "decode 1x1024", "prompt 512", "decode 64x1024", "prompt 4096", "decode 16x8192",
        "decode 16x1024", "decode 256x1024", "decode 1x8192", "decode 64x8192", "decode 256x8192",
        "mixed 512+32x1024",
    ),
    "cpu": (
        "decode 1x1024", "prompt 512", "decode 16x1024", "decode 1x8192", "mixed 512+16x1024",
    ),
}  # fmt: skip
MAIN_STEPS = STEPS["cuda"][:5]
# What attention reads in such a step is compared with the weights that other layers read.
TYPICAL = Step(decodes=16, context=1024)


def fitting(problem: AttentionProblem, device_kind: str, most_bytes: int) -> list[str]:
    """Those of STEPS whose cache has at most so many bytes: of one with a larger cache, half of the
    requests, as often as it takes."""
    every = map(Step.parse, STEPS[device_kind])
    fit = (_fitting(step, problem, most_bytes) for step in every)
    return list(dict.fromkeys(step.name for step in fit if step))


def _fitting(step: Step, problem: AttentionProblem, most_bytes: int) -> Step | None:
    while step.bytes_of_cache(problem) > most_bytes:
        if step.decodes < 2:
            return None
        step = replace(step, decodes=step.decodes // 2)
    return step


def is_telling(names: Iterable[str]) -> bool:
    """Whether both a decode and a prompt are among the steps: one says nothing of the other."""
    kinds = {name.partition(" ")[0] for name in names}
    return {"decode", "prompt"} <= kinds
