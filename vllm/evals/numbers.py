"""Numbers in texts."""

import re
from decimal import Decimal

# A minus is a sign only where no operand precedes it: "7-3" holds 7 and 3.
_NUMBER = re.compile(
    r"(?:(?<![\w)\]%])[-\u2212])?\$?(?:(?<=\$)[-\u2212])?"
    r"((?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+)"
)


_DIGITS = re.compile(r"[0-9]+")


def last_digits(text: str) -> Decimal | None:
    """The last run of digits, commas removed; None if there is none.

    What counts in vLLM's and SGLang's GSM8K scripts: no sign, and "18.00" is 0.
    """
    runs = _DIGITS.findall(text.replace(",", ""))
    return Decimal(runs[-1]) if runs else None


def last_number(text: str) -> Decimal | None:
    """The last number written in digits: "-$1,234.50." is -1234.50. None if there is none."""
    matches = list(_NUMBER.finditer(text))
    if not matches:
        return None
    match = matches[-1]
    is_negative = any(sign in match[0] for sign in "-\u2212")
    value = Decimal(match[1].replace(",", ""))
    return value.copy_negate() if is_negative else value
