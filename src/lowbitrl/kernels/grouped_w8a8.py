"""``grouped_w8a8_matmul``: each routed row's 8-bit codes by its own expert's 8-bit weight, in one launch.

    y[s] = w8a8(x[s // k], weight of expert ids[s])      s = 0 .. T * k - 1, the (token, choice) pairs

The arithmetic is ``w8a8_matmul``'s, the blocks are ``align_experts``'.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lowbitrl.formats import QuantizedTensor

from .backend import REFERENCE
from .grouped_w4a16 import ExpertBlocks
from .w8a8 import kind_of


def grouped_w8a8_matmul(
    x: QuantizedTensor, weight: QuantizedTensor, blocks: ExpertBlocks, *, bias: Tensor | None = None
) -> Tensor:
    """(R, K) by the (E, N, K) stack -> (S, N) in BF16, by the backend the blocks were cut for.

    Args:
        x: ``fp8-token`` or ``int8-token``, S / k rows (each used for its k choices) or S rows. weight: codes of
            the same kind with a scale a row. bias: (E, N) BF16.

    Raises:
        ValueError: the two are not of one kind, or x's rows do not divide the S routed ones.
    """
    kind, rows, total = kind_of(x, weight), x.shape[0], blocks.ids.numel()
    if total and (not rows or total % rows):
        raise ValueError(f"x has {rows} rows for {total} routed ones; give one a token or one a choice")
    scale_a = x.scale.reshape(-1).float()
    scale_b = weight.scale.reshape(-1).float().expand(weight.shape[:-1].numel()).view(weight.shape[:-1])
    by_triton = blocks.backend != REFERENCE
    return torch.ops.lowbitrl.grouped_w8a8_matmul(
        x.qdata, weight.qdata, scale_a, scale_b, bias, blocks.slots, blocks.experts, blocks.ids, kind, blocks.block,
        total // rows if rows else 1, by_triton,
    )  # fmt: skip


@torch.library.custom_op("lowbitrl::grouped_w8a8_matmul", mutates_args=())
def _grouped_w8a8_matmul(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, bias: Tensor | None, slots: Tensor, experts: Tensor,
    ids: Tensor, kind: str, block: int, slots_per_row: int, by_triton: bool,
) -> Tensor:  # fmt: skip
    out = a.new_empty(ids.numel(), b.shape[1], dtype=torch.bfloat16)
    if by_triton:
        from .w8a8_triton import launch_w8a8

        launch_w8a8(a, b, scale_a, scale_b, bias, out, kind, slots, experts, block, slots_per_row)
        return out
    for e in ids.unique().tolist():
        rows = (ids == e).nonzero()[:, 0]
        source = rows // slots_per_row
        own = None if bias is None else bias[e]
        out[rows] = torch.ops.lowbitrl.w8a8_matmul(
            a[source], b[e], scale_a[source], scale_b[e], own, kind, REFERENCE
        )
    return out


@_grouped_w8a8_matmul.register_fake
def _(a, b, scale_a, scale_b, bias, slots, experts, ids, kind, block, slots_per_row, by_triton):
    return a.new_empty(ids.numel(), b.shape[1], dtype=torch.bfloat16)
