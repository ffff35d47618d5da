"""``grouped_w4a16_matmul``: each routed row by its own expert's 4-bit weight, in one launch.

    y[s] = w4a16(x[s // k], weight of expert ids[s])      s = 0 .. T * k - 1, the (token, choice) pairs

The arithmetic is ``w4a16_matmul``'s; a row's bits do not depend on which rows share its block. Rows are first
put into blocks of one expert each (``align_experts``): a launch, no host synchronization, and sizes that depend
on shapes alone, so that a CUDA graph holds for any routing.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lowbitrl.formats import QuantizedTensor, get_format

from .backend import AUTO, REFERENCE, TRITON, choose
from .cuda_library import CUDA
from .w4a16 import finish
from .weights4 import describe, factors, why_not_cuda, why_not_weight4

# Rows of a block; what the CUDA kernel's token tiles are.
BLOCK_SIZES = (8, 16, 32, 64)
TRITON_BLOCK = 16


@dataclass(frozen=True)
class ExpertBlocks:
    """Rows grouped into blocks of one expert.

    slots: int32 (blocks * block,): rows of the output, ``total`` where a block is padded.
    experts: int32 (blocks,): each block's expert, -1 past the last block that has rows.
    ids: int32 (total,): each row's expert. backend: which implementation the blocks were cut for.
    """

    slots: Tensor
    experts: Tensor
    ids: Tensor
    block: int
    backend: str


def block_size(rows: int, experts: int) -> int:
    """Rows a block: about what an expert gets when all are hit."""
    return next((size for size in BLOCK_SIZES if size * experts >= rows), BLOCK_SIZES[-1])


def most_blocks(rows: int, experts: int, block: int) -> int:
    """Blocks that any routing fits in: one a row at most, and one that is not full a hit expert."""
    return min(rows, rows // block + min(experts, rows))


def align_experts(ids: Tensor, weight: QuantizedTensor, *, backend: str = AUTO) -> ExpertBlocks:
    """Blocks for routed rows; one alignment serves every stack of the same experts.

    Args:
        ids: integers (T, k), each token's experts. weight: any of the layer's stacks, (E, N, K).
    """
    chosen = choose("products by expert", backend, ids.device, candidates(weight))
    flat, experts = ids.reshape(-1).int(), weight.shape[0]
    block = max(block_size(flat.numel(), experts), TRITON_BLOCK if chosen == TRITON else 0)
    slots, owners = torch.ops.lowbitrl.align_experts(flat, experts, block, chosen == CUDA)
    return ExpertBlocks(slots, owners, flat, block, chosen)


def candidates(weight: QuantizedTensor) -> dict[str, str | None]:
    """The implementations for this stack, best first, with why one can't do it."""
    if get_format(weight.format).bits == 8:
        return {TRITON: None, REFERENCE: None}
    reason = why_not_weight4(weight)
    return {CUDA: why_not_cuda(weight), TRITON: reason, REFERENCE: reason}


def grouped_w4a16_matmul(
    x: Tensor,
    weight: QuantizedTensor,
    blocks: ExpertBlocks,
    *,
    bias: Tensor | None = None,
    token_scale: Tensor | None = None,
) -> Tensor:
    """(R, K) by the (E, N, K) stack -> (S, N) in BF16, by the backend the blocks were cut for.

    Args:
        x: BF16, S / k rows (each used for its k choices) or S rows (one a choice).
        bias: (E, N) BF16. token_scale: (R,) or (R, 1) fp32, multiplied onto each row's sums.

    Raises:
        ValueError: x is not BF16, or its rows do not divide the S routed rows.
    """
    rows, total = x.shape[0], blocks.ids.numel()
    if x.dtype != torch.bfloat16:
        raise ValueError(f"x is {x.dtype}; grouped_w4a16_matmul takes bfloat16")
    if total and (not rows or total % rows):
        raise ValueError(f"x has {rows} rows for {total} routed ones; give one a token or one a choice")
    per_row = total // rows if rows else 1
    scales = None if token_scale is None else token_scale.reshape(-1).contiguous()
    if blocks.backend == REFERENCE:
        return reference(x, weight, blocks.ids, bias, scales)
    w = describe(weight)
    return torch.ops.lowbitrl.grouped_w4a16_matmul(
        x.detach(), w.codes, w.scale, w.global_scale, scales, bias, blocks.slots, blocks.experts, total, w.group,
        w.nvfp4, blocks.block, per_row, blocks.backend,
    )  # fmt: skip


def reference(
    x: Tensor, weight: QuantizedTensor, ids: Tensor, bias: Tensor | None, token_scale: Tensor | None
) -> Tensor:
    """The definition, expert by expert, in fp32."""
    values, scale = factors(weight)
    scale = scale.reshape(-1).expand(weight.shape[0])
    out = x.new_empty(ids.numel(), weight.shape[1])
    per_row = ids.numel() // max(x.shape[0], 1)
    for e in ids.unique().tolist():
        rows = (ids == e).nonzero()[:, 0]
        source = rows // per_row
        scales = None if token_scale is None else token_scale[source]
        sums = x[source].float() @ values[e].T
        out[rows] = finish(sums, scale[e], None if bias is None else bias[e], scales)
    return out


@torch.library.custom_op("lowbitrl::align_experts", mutates_args=())
def _align_experts(ids: Tensor, experts: int, block: int, by_cuda: bool) -> tuple[Tensor, Tensor]:
    blocks = most_blocks(ids.numel(), experts, block)
    if by_cuda:
        from .w4a16_cuda import launch_align

        slots, owners = ids.new_empty(blocks * block), ids.new_empty(blocks)
        launch_align(ids, experts, block, blocks, slots, owners)
        return slots, owners
    return align_by_sorting(ids, experts, block, blocks)


@_align_experts.register_fake
def _(ids, experts, block, by_cuda):
    blocks = most_blocks(ids.numel(), experts, block)
    return ids.new_empty(blocks * block), ids.new_empty(blocks)


def align_by_sorting(ids: Tensor, experts: int, block: int, blocks: int) -> tuple[Tensor, Tensor]:
    """(slots, experts) of ``ExpertBlocks`` from int32 ids (S,), by torch ops of fixed sizes."""
    total = ids.numel()
    index = ids.long()
    counts = torch.zeros(experts, dtype=torch.long, device=ids.device).scatter_add_(
        0, index, torch.ones_like(index)
    )
    taken = (counts + block - 1) // block
    last = taken.cumsum(0)
    order = index.argsort(stable=True)
    within = torch.arange(total, device=ids.device) - (counts.cumsum(0) - counts)[index[order]]
    slots = ids.new_full((blocks * block,), total)
    slots[(last - taken)[index[order]] * block + within] = order.int()
    number = torch.arange(blocks, device=ids.device)
    owners = torch.searchsorted(last, number, right=True)
    return slots, torch.where(number < last[-1], owners, -1).int()


@torch.library.custom_op("lowbitrl::grouped_w4a16_matmul", mutates_args=())
def _grouped_w4a16_matmul(
    x: Tensor, codes: Tensor, scale: Tensor, global_scale: Tensor | None, token_scale: Tensor | None,
    bias: Tensor | None, slots: Tensor, experts: Tensor, total: int, group: int, nvfp4: bool, block: int,
    slots_per_row: int, backend: str,
) -> Tensor:  # fmt: skip
    if backend == TRITON:
        from .w4a16_triton import launch_w4a16
    else:
        from .w4a16_cuda import launch_w4a16
    out = x.new_empty(total, codes.shape[1])
    rows = x if x.stride(-1) == 1 else x.contiguous()
    shared = global_scale is not None and global_scale.numel() != codes.shape[0]
    each = global_scale.expand(codes.shape[0]).contiguous() if shared else global_scale  # type: ignore[union-attr]
    launch_w4a16(
        rows, codes, scale, each, token_scale, bias, out, group, nvfp4, slots, experts, block, slots_per_row
    )
    return out


@_grouped_w4a16_matmul.register_fake
def _(
    x,
    codes,
    scale,
    global_scale,
    token_scale,
    bias,
    slots,
    experts,
    total,
    group,
    nvfp4,
    block,
    slots_per_row,
    backend,
):
    return x.new_empty(total, codes.shape[1])
