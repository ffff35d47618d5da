"""Which backend and which CUDA variant for how many tokens: made by ``benchmarks``' sweep, not by hand."""

from __future__ import annotations

# Above this many tokens decoding the weight once and calling cuBLAS is faster.
CUBLAS_TOKENS = 384


def prefers_cublas(tokens: int) -> bool:
    """Whether a product of so many tokens should decode the weight first."""
    return tokens > CUBLAS_TOKENS
