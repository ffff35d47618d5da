"""``byte_checksums``: the position-weighted sums that manifests hold, the same numbers on every device.

    31 * sum over 8-byte words w_i of (w_i ^ (w_i >> 29)) * (2 i P + 1)
       + sum over the bytes b_j after the last whole word of b_j * (j + 1),    modulo 2^64

>> is arithmetic. The sum wraps, and a wrapping sum has no order: many programs may add at once.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .backend import AUTO, REFERENCE, TRITON, choose

PRIME = 2_654_435_761  # Knuth's multiplicative-hash constant: odd, so multiplying loses no bit.
TAIL = 31


def byte_checksums(tensors: Sequence[Tensor], backend: str = AUTO) -> Tensor:
    """int64 (n,) checksums of the bytes of n tensors of one device; no host synchronization.

    On a GPU one launch serves all of them: a publication has hundreds of small tensors.
    """
    if not tensors:
        return torch.zeros(0, dtype=torch.int64)
    raw = [_bytes(tensor) for tensor in tensors]
    if choose("checksum", backend, raw[0].device, {TRITON: None, REFERENCE: None}) == REFERENCE:
        return torch.stack([_reference(one) for one in raw])
    from .checksum_triton import launch_checksums

    return launch_checksums(raw, PRIME, TAIL)


def _bytes(tensor: Tensor) -> Tensor:
    """uint8 (n,) of a tensor, at an address that words can be read from."""
    raw = tensor.detach().contiguous().view(-1).view(torch.uint8)
    return raw if raw.storage_offset() % 8 == 0 else raw.clone()


def _reference(raw: Tensor) -> Tensor:
    whole = raw.numel() // 8 * 8
    words, tail = raw[:whole].view(torch.int64), raw[whole:].long()
    # int64 arithmetic wraps, which is what a hash wants.
    odd = 2 * torch.arange(words.numel(), device=raw.device) * PRIME + 1
    places = torch.arange(1, tail.numel() + 1, device=raw.device)
    return TAIL * ((words ^ (words >> 29)) * odd).sum() + (tail * places).sum()
