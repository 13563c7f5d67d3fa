"""Sums of three numbers, each of them one token, in GSM8K's format.

    python tests/evals/sums/problems.py FOLDER

writes FOLDER/test.jsonl, the held-out sums, and FOLDER/train.jsonl, which the harness wants though
no worked example is needed. Numbers are held out by a hash of all three in any order.
"""

import json
import sys
from pathlib import Path

import torch
from torch import Tensor

NUM_TERMS = 3
LARGEST = 99
NUM_QUESTIONS = 4000
_HELD_OUT_SHARE = 8  # one of so many triples is never trained on


def held_out() -> Tensor:
    """int64 [NUM_QUESTIONS, NUM_TERMS], none twice in the same order."""
    terms = torch.cartesian_prod(*[torch.arange(LARGEST + 1)] * NUM_TERMS)
    terms = terms[_is_held_out(terms)]
    order = torch.randperm(len(terms), generator=torch.Generator().manual_seed(0))
    return terms[order[:NUM_QUESTIONS]]


def draw(num_rows: int, generator: torch.Generator) -> Tensor:
    """int64 [num_rows, NUM_TERMS] to train on."""
    terms = torch.randint(LARGEST + 1, (2 * num_rows, NUM_TERMS), generator=generator)
    return terms[~_is_held_out(terms)][:num_rows]


def _is_held_out(terms: Tensor) -> Tensor:
    """Of the elementary symmetric polynomials, which tell the terms but not their order."""
    a, b, c = terms.unbind(-1)
    key = (a + b + c) * 7919 + (a * b + b * c + c * a) * 104_729 + a * b * c * 1_299_709
    return key // 64 % _HELD_OUT_SHARE == 0


def question(terms: Tensor) -> str:
    return " + ".join(map(str, terms.tolist()))


def write(folder: Path) -> None:
    """test.jsonl and train.jsonl, as GSM8K has them."""
    folder.mkdir(parents=True, exist_ok=True)
    trained = draw(200, torch.Generator().manual_seed(0))
    for split, all_terms in (("test", held_out()), ("train", trained)):
        rows = [
            json.dumps({"question": question(terms), "answer": f"#### {int(terms.sum())}"})
            for terms in all_terms
        ]
        (folder / f"{split}.jsonl").write_text("\n".join(rows) + "\n")


if __name__ == "__main__":
    write(Path(sys.argv[1]))
