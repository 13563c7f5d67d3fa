"""The GSM8K questions: from a folder, or downloaded on request, and checked by checksum.

GSM8K: Cobbe et al., "Training Verifiers to Solve Math Word Problems" (2021), MIT licence.
"""

import hashlib
import json
import random
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path

from vllm import envs
from vllm.errors import ConfigError
from vllm.evals.numbers import last_number
from vllm.utils.files import write_atomically

SPLITS = ("train", "test")
SOURCE = (
    "https://raw.githubusercontent.com/openai/grade-school-math/"
    "3101c7d5072418e28b9008a6636bde82a006892c/grade_school_math/data/{split}.jsonl"
)
# Shots come from this many first training items, so that the whole file (7,473 items) and its
# beginning give the same prompts.
NUM_SHOT_ITEMS = 200
CHECKSUMS = {
    "3730d312f6e3440559ace48831e51066acaca737f6eabec99bccb9e4b3c39d14": "test",
    "17f347dc51477c50d4efb83959dbb7c56297aba886e5544ee2aaed3024813465": "train",
    # The first 200 lines of the training file.
    "03a8e89683ff5335dd79e1d8468ede692f263b4de113e59025833eeadc0f05a9": "train",
}
_TIMEOUT_S = 60


@dataclass(frozen=True)
class Item:
    """A question, its worked answer (which ends with `#### NUMBER`) and that number."""

    question: str
    solution: str
    label: Decimal


def default_folder() -> Path:
    return Path(envs.VLLM_CACHE_ROOT) / "gsm8k"


def load(folder: Path, split: str, is_checked: bool = True) -> list[Item]:
    """The items of FOLDER/SPLIT.jsonl. ConfigError if it is missing, malformed, or (is_checked)
    not the published file; is_checked=False takes data of one's own in that format."""
    path = folder / f"{split}.jsonl"
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ConfigError(
            f"GSM8K: {path} cannot be read ({error.strerror}); give the folder of test.jsonl and "
            f"train.jsonl with --data-dir, or let --download fetch them"
        ) from error
    if is_checked:
        check(data, split, str(path))
    return parse(data, str(path))


def check(data: bytes, split: str, source: str) -> None:
    """ConfigError unless data is a published file of this split."""
    found = hashlib.sha256(data).hexdigest()
    if CHECKSUMS.get(found) != split:
        known = ", ".join(digest for digest, name in CHECKSUMS.items() if name == split)
        raise ConfigError(
            f"GSM8K: {source} is not the published {split} set: SHA-256 {found}, expected {known}; "
            f"fetch it again with --download, or give --no-checksum for data of your own"
        )


def parse(data: bytes, source: str) -> list[Item]:
    """One {"question", "answer"} object per line; ConfigError with the line's number."""
    items = []
    for number, line in enumerate(data.splitlines(), 1):
        try:
            row = json.loads(line)
            question, solution = row["question"], row["answer"]
            label = last_number(solution.rpartition("####")[2]) if "####" in solution else None
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise ConfigError(
                f'{source}, line {number}: not an object with texts "question" and "answer" '
                f"({type(error).__name__}: {error})"
            ) from error
        if label is None or not isinstance(question, str):
            raise ConfigError(f'{source}, line {number}: "answer" must end with "#### NUMBER"')
        items.append(Item(question, solution, label))
    if not items:
        raise ConfigError(f"{source} has no questions")
    return items


def download(folder: Path) -> None:
    """Fetches both files, checks them, and writes them: nothing is written of a wrong file."""
    for split in SPLITS:
        url = SOURCE.format(split=split)
        try:
            with urllib.request.urlopen(url, timeout=_TIMEOUT_S) as response:
                data = response.read()
        except OSError as error:
            raise ConfigError(f"GSM8K: {url} cannot be fetched: {error}") from error
        check(data, split, url)
        try:
            write_atomically(folder / f"{split}.jsonl", data)
        except OSError as error:
            raise ConfigError(f"GSM8K: {folder} cannot be written: {error}") from error


def choose_shots(train: Sequence[Item], num_shots: int, seed: int | None) -> list[Item]:
    """The first `num_shots` training items; with a seed, a draw from the first 200."""
    pool = train[:NUM_SHOT_ITEMS]
    if num_shots > len(pool):
        raise ConfigError(f"--num-shots {num_shots}: there are {len(pool)} training items for it")
    return list(pool[:num_shots]) if seed is None else random.Random(seed).sample(pool, num_shots)


def prompt_of(question: str, shots: Sequence[Item]) -> str:
    """Worked examples, then the question, in the layout of lm-evaluation-harness' `gsm8k`."""
    worked = (f"Question: {shot.question}\nAnswer: {shot.solution}\n\n" for shot in shots)
    return "".join(worked) + f"Question: {question}\nAnswer:"
