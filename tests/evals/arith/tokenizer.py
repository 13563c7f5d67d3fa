"""The model's tokenizer: byte-level BPE on the problems' texts, every digit a token of its own."""

from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from evals.arith import problems

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

VOCAB_SIZE = 640
END_OF_TEXT = "<|endoftext|>"
_NUM_PROBLEMS = 20_000


def worked(problem: problems.Problem) -> str:
    """A problem as the harness lays out its worked examples."""
    return f"Question: {problem.question}\nAnswer: {problem.answer}\n\n"


def build() -> "PreTrainedTokenizerFast":
    """Learns it anew; always the same one."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\d"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = (worked(problem) for problem in islice(problems.stream(seed=1), _NUM_PROBLEMS))
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END_OF_TEXT)


def save(folder: Path) -> None:
    build().save_pretrained(folder)
