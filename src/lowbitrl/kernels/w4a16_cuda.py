"""Launcher of the CUDA kernel of ``w4a16_matmul`` and its grouped form (``cuda/w4a16.cu``)."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from .cuda_library import address, check, library, stream

CHUNK = 128
TOKENS_A_TILE = 8
MOST_SPLITS = 8
# Shared memory for activations that lets two CTAs live on one multiprocessor.
ACTIVATION_BYTES = 100 << 10


@dataclass(frozen=True)
class Variant:
    """A kernel that is built: ``tiles`` * 8 tokens, ``warps`` * ``rows`` * 16 weight rows a CTA, ``stages`` ahead.

    grouped: four warps multiply together (wgmma, sm90 alone).
    """

    tiles: int
    rows: int
    warps: int
    stages: int
    grouped: bool = False

    @property
    def height(self) -> int:
        """Weight rows a CTA does."""
        return self.warps * self.rows * 16


VARIANTS = {1: Variant(1, 2, 4, 3), 2: Variant(2, 2, 4, 3), 4: Variant(4, 2, 4, 2), 8: Variant(8, 2, 4, 2)}


def tiles_for(tokens: int) -> int:
    """Token tiles of eight a CTA takes."""
    wanted = -(-tokens // TOKENS_A_TILE)
    return min((t for t in VARIANTS if t >= wanted), default=max(VARIANTS))


def splits_for(variant: Variant, n: int, k: int, token_blocks: int, processors: int) -> int:
    """Shares of K, a cluster's size: the least that gives every multiprocessor two CTAs to overlap."""
    chunks = -(-k // CHUNK)
    ctas = -(-n // variant.height) * token_blocks
    splits = 1
    while splits < MOST_SPLITS and ctas * splits < 2 * processors and splits * 2 <= chunks // variant.stages:
        splits *= 2
    return splits


def phase_for(variant: Variant, k: int, splits: int) -> int:
    """Chunks of activations in shared memory at a time: a whole share, or whole rounds of stages."""
    chunks = -(-k // CHUNK)
    share = -(-chunks // splits)
    fits = ACTIVATION_BYTES // (CHUNK * variant.tiles * TOKENS_A_TILE * 2)
    return share if share <= fits else max(fits // variant.stages, 1) * variant.stages


@functools.cache
def _processors(device: int) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def launch_w4a16(
    x: Tensor, codes: Tensor, scale: Tensor, global_scale: Tensor | None, token_scale: Tensor | None,
    bias: Tensor | None, out: Tensor, group: int, nvfp4: bool,
    slots: Tensor | None = None, experts: Tensor | None = None, block: int = 0, slots_per_row: int = 1,
) -> None:  # fmt: skip
    """Write ``out`` (slots, N); ``slots`` and ``experts`` make it grouped, ``block`` slots a group."""
    m, n = out.shape
    if not m or not n:
        return
    if x.stride(-1) != 1 or x.stride(0) % 8 or x.data_ptr() % 16:
        x = x.contiguous()
    k = x.shape[-1]
    variant = VARIANTS[block // TOKENS_A_TILE if block else tiles_for(m)]
    token_blocks = experts.numel() if experts is not None else -(-m // (variant.tiles * TOKENS_A_TILE))
    splits = splits_for(variant, n, k, token_blocks, _processors(x.device.index or 0))
    code = library().lowbitrl_w4a16(
        0 if nvfp4 else 1, address(x), address(codes), address(scale), address(global_scale),
        address(token_scale), address(bias), address(out), address(slots), address(experts),
        m, n, k, group, x.stride(0), slots_per_row, token_blocks,
        variant.tiles, variant.rows, variant.warps, variant.stages, variant.grouped, splits,
        phase_for(variant, k, splits), stream(),
    )  # fmt: skip
    check(code, "w4a16")


def launch_align(
    ids: Tensor, experts: int, block: int, blocks: int, slots: Tensor, block_expert: Tensor
) -> None:
    """Fill ``slots`` (blocks * block,) and ``block_expert`` (blocks,), both int32, from int32 ids (S,)."""
    code = library().lowbitrl_moe_align(
        address(ids), ids.numel(), experts, block, blocks, address(slots), address(block_expert), stream()
    )
    check(code, "moe_align")
