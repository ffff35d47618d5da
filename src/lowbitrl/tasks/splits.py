"""Which side of the train / held-out border a prompt's text falls on: a hash of the text decides.

So the border needs no state, holds for endless streams, and is the same for every seed.
"""

from __future__ import annotations

import hashlib

HELD_OUT_SHARE = 4  # one text in four


def digest(text: str) -> int:
    """64 bits of BLAKE2b: the same in every process and on every machine, unlike hash()."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")


def is_held_out(text: str) -> bool:
    """True for one text in four."""
    return digest(text) % HELD_OUT_SHARE == 0
