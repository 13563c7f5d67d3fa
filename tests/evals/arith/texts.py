"""The model beside this file, and token ids to score it on."""

from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from evals.arith import problems, tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

MODEL = Path(__file__).parent / "model"
# On numbers as large as it was trained on, the model is certain of nearly every digit, and no
# arithmetic changes its mind; on larger ones it is not.
STRETCH = 1.7


def load_tokenizer() -> "PreTrainedTokenizerFast":
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(MODEL)


def token_ids(num_texts: int, stretch: float = STRETCH, seed: int = 2) -> list[list[int]]:
    """Held-out problems with their worked answers: about 125 tokens each."""
    encode = load_tokenizer()
    stream = problems.stream(seed, is_held_out=True, stretch=stretch)
    texts = (tokenizer.worked(problem).rstrip() for problem in islice(stream, num_texts))
    return [encode(text)["input_ids"] for text in texts]
