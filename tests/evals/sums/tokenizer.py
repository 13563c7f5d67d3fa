"""The model's tokenizer: a word, or a number from 0 to the largest sum, is one token; spaces and
plus signs are none."""

from typing import TYPE_CHECKING

from evals.sums import problems
from torch import Tensor
from torch.nn.functional import pad

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

WORDS = ("<|endoftext|>", "Question:", "Answer:")
VOCAB_SIZE = 320
NUMBER = len(WORDS)
"""The token of 0; that of n is n more."""


def build() -> "PreTrainedTokenizerFast":
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    numbers = range(VOCAB_SIZE - NUMBER)
    assert problems.NUM_TERMS * problems.LARGEST in numbers
    words = [*WORDS, *map(str, numbers)]
    tokenizer = Tokenizer(
        models.WordLevel({word: i for i, word in enumerate(words)}, unk_token=WORDS[0])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s+]+"), "removed")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=WORDS[0])


def prompts(terms: Tensor) -> Tensor:
    """Token ids int64 [rows, terms + 2] of "Question: a + b + c\nAnswer:"."""
    question, answer = map(WORDS.index, ("Question:", "Answer:"))
    return pad(pad(terms + NUMBER, (1, 0), value=question), (0, 1), value=answer)
