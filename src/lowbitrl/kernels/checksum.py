"""``word_checksum``: the position-weighted sum that manifests hold, the same number on every device.

    sum over 8-byte words w_i of (w_i ^ (w_i >> 29)) * (2 i P + 1), modulo 2^64

>> is arithmetic. The sum wraps, and a wrapping sum has no order: many programs may add at once.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .backend import AUTO, REFERENCE, TRITON, choose

PRIME = 2_654_435_761  # Knuth's multiplicative-hash constant: odd, so multiplying loses no bit.


def word_checksum(words: Tensor, backend: str = AUTO) -> Tensor:
    """int64 () checksum of contiguous int64 words (N,); no host synchronization."""
    if choose("checksum", backend, words.device, {TRITON: None, REFERENCE: None}) == REFERENCE:
        # int64 arithmetic wraps, which is what a hash wants.
        odd = 2 * torch.arange(words.numel(), device=words.device) * PRIME + 1
        return ((words ^ (words >> 29)) * odd).sum()
    from .checksum_triton import launch_checksum

    return launch_checksum(words, PRIME)
