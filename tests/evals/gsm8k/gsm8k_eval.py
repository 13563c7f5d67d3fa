"""GSM8K against a running server: python tests/evals/gsm8k/gsm8k_eval.py --port 8000 --help"""

import argparse
import sys

from vllm.errors import VllmError
from vllm.evals.gsm8k import Server, add_flags, evaluate, run

__all__ = ["Server", "evaluate", "main"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    add_flags(parser)
    try:
        return run(parser.parse_args())
    except VllmError as error:
        print(f"gsm8k_eval: error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
