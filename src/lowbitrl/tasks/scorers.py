"""Scorers that read a number out of a completion. 1.0 if it equals the answer, else 0.0.

What counts as a number: an optional minus (`-` or U+2212, attached, and not after a digit, letter or
closing bracket, where it is an operator), digits with commas in threes or without, a decimal part, an
exponent. A currency sign before it and whatever follows it are ignored: `$42`, `42%`, `12.`, `12th` and
`1e3` read 42, 42, 12, 12 and 1000. Digits inside a word (`H2O`) are none; neither is `twelve`. Values
are compared exactly: 1.50 equals 1.5.
"""

from __future__ import annotations

import re
from decimal import Decimal

NUMBER = re.compile(
    r"(?P<sign>(?<![0-9A-Za-z)\]}.])[-\N{MINUS SIGN}])?"
    r"[$€£]?"
    r"(?P<digits>(?<![0-9A-Za-z_])(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?"
    r"|(?<![0-9A-Za-z_.])\.[0-9]+)"
    # A longer exponent is no number that anyone means, and Decimal refuses it.
    r"(?P<exponent>[eE][-+]?[0-9]{1,4}(?![0-9A-Za-z]))?"
)


def numbers(text: str) -> list[Decimal]:
    """Every number in `text`, in order.

    >>> numbers("From -1,234.50 to 12.")
    [Decimal('-1234.50'), Decimal('12')]
    """
    found = []
    for match in NUMBER.finditer(text):
        digits = match["digits"].replace(",", "") + (match["exponent"] or "")
        found.append(-Decimal(digits) if match["sign"] else Decimal(digits))
    return found


def parse_number(text: str | None) -> Decimal | None:
    """The value of a text that is one number and nothing else, None if it is not."""
    match = NUMBER.fullmatch((text or "").strip())
    return numbers(match[0])[0] if match else None


def last_number(completion: str, answer: str | None) -> float:
    """For answers with reasoning before them. An answer that is no number is never reached: 0.0."""
    return _equal(numbers(completion)[-1:], answer)


def first_number(completion: str, answer: str | None) -> float:
    """For replies begun up to the answer (`7 + 5 =`): what a model rambles afterwards does not count."""
    return _equal(numbers(completion)[:1], answer)


def _equal(found: list[Decimal], answer: str | None) -> float:
    expected = parse_number(answer)
    return float(expected is not None and found == [expected])


NUMBER_SCORERS = {"last-number": last_number, "first-number": first_number}
