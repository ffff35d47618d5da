"""Launcher of the CUDA kernel of ``w4a16_matmul`` and its grouped form (``cuda/w4a16.cu``)."""

from __future__ import annotations

import torch
from torch import Tensor

from .cuda_library import WITH_GROUPS, address, architecture, check, library, stream
from .w4a16_choice import CHUNK, TOKENS_A_TILE, Plan, Variant, choice_for, splits_that_fit

# Shared memory for activations that lets two CTAs live on one multiprocessor.
ACTIVATION_BYTES = 100 << 10
# Where the table's variant needs groups and the device has none.
WITHOUT_GROUPS = {
    1: Variant(1, 2, 4, 2),
    2: Variant(2, 2, 4, 2),
    4: Variant(4, 2, 4, 2),
    8: Variant(8, 2, 4, 2),
    16: Variant(8, 2, 4, 2),
}


def plan_for(nvfp4: bool, m: int, n: int, k: int, block: int) -> Plan:
    """The table's plan for ``m`` tokens, or for blocks of ``block`` rows of one expert."""
    choice = choice_for(nvfp4, block or m, n, k, grouped=bool(block))
    variant = choice.variant
    if variant.grouped and architecture() != WITH_GROUPS:
        variant = WITHOUT_GROUPS[variant.tiles]
    return Plan(variant, splits_that_fit(choice, k), choice.overlap)


def phase_for(variant: Variant, k: int, splits: int) -> int:
    """Chunks of activations in shared memory at a time: a whole share, or whole rounds of what is in flight."""
    chunks = -(-k // CHUNK)
    share = -(-chunks // splits)
    fits = ACTIVATION_BYTES // (CHUNK * variant.tiles * TOKENS_A_TILE * 2)
    return share if share <= fits else max(fits // variant.round, 1) * variant.round


def launch_w4a16(
    x: Tensor, codes: Tensor, scale: Tensor, global_scale: Tensor | None, token_scale: Tensor | None,
    bias: Tensor | None, out: Tensor, group: int, nvfp4: bool,
    slots: Tensor | None = None, experts: Tensor | None = None, block: int = 0, slots_per_row: int = 1,
    plan: Plan | None = None,
) -> None:  # fmt: skip
    """Write ``out`` (slots, N); ``slots`` and ``experts`` make it grouped, ``block`` slots a group.

    plan: in place of the table's.
    """
    m, n = out.shape
    if not m or not n:
        return
    # Loads are 16 bytes wide: rows and bases must start at multiples of that.
    if x.stride(-1) != 1 or x.stride(0) % 8 or x.data_ptr() % 16:
        x = x.clone(memory_format=torch.contiguous_format)
    if codes.data_ptr() % 16:
        codes = codes.clone()
    k = x.shape[-1]
    variant, splits, overlap = plan or plan_for(nvfp4, m, n, k, block)
    token_blocks = experts.numel() if experts is not None else -(-m // (variant.tiles * TOKENS_A_TILE))
    code = library().lowbitrl_w4a16(
        0 if nvfp4 else 1, address(x), address(codes), address(scale), address(global_scale),
        address(token_scale), address(bias), address(out), address(slots), address(experts),
        m, n, k, group, x.stride(0), slots_per_row, token_blocks,
        variant.tiles, variant.rows, variant.warps, variant.stages, variant.grouped, variant.shares, splits,
        phase_for(variant, k, splits), overlap, stream(x.device),
    )  # fmt: skip
    check(code, "w4a16")


def launch_align(
    ids: Tensor, experts: int, block: int, blocks: int, slots: Tensor, block_expert: Tensor
) -> None:
    """Fill ``slots`` (blocks * block,) and ``block_expert`` (blocks,), both int32, from int32 ids (S,)."""
    code = library().lowbitrl_moe_align(
        address(ids),
        ids.numel(),
        experts,
        block,
        blocks,
        address(slots),
        address(block_expert),
        stream(ids.device),
    )
    check(code, "moe_align")
