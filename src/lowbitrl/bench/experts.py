"""One layer of Qwen3-30B-A3B's experts, 128 of them, 8 a token, 2048 x 768, by 4-bit bytes, under random routing."""

from __future__ import annotations

import torch
from torch import Tensor

from lowbitrl.formats import QuantizedTensor, get_format
from lowbitrl.kernels import (
    align_experts,
    gate_rows,
    grouped_w4a16_matmul,
    quantize_residual,
    weighted_sum,
)

from .record import Bench, Row
from .timing import cold_sets

EXPERTS, CHOICES, HIDDEN, INNER = 128, 8, 2048, 768
TOKENS = (16, 64, 256)
FORMATS = ("nvfp4", "int4-g128")
GOAL_TOKENS, GOAL = 64, 0.6
BF16_BYTES = 2
RESIDUAL, REPAIRED_OVER_W4A16 = 0.5, 1.1


def run(bench: Bench) -> None:
    """Rows of the whole layer (blocks, two products, gate, weighted sum); findings against the goal."""
    for name in FORMATS:
        layers = stacks(name, bench.device)
        for tokens in TOKENS:
            row = time_layer(bench, layers, tokens, name, residual=None)
            if tokens == GOAL_TOKENS:
                what = f"grouped W4A16 {name}, Qwen3-30B-A3B layer, {tokens} tokens, share of the byte limit"
                bench.find(what, row.ratio, at_least=GOAL)
            if tokens == GOAL_TOKENS and name == "nvfp4":
                repaired = time_layer(bench, layers, tokens, name, residual=RESIDUAL)
                what = f"emulated W4A4 + residual {RESIDUAL} at W13, Qwen3-30B-A3B layer, {tokens} tokens, over W4A16"
                bench.find(what, repaired.p50 / row.p50, at_most=REPAIRED_OVER_W4A16)
        del layers


def stacks(name: str, device: str) -> list[tuple[QuantizedTensor, QuantizedTensor]]:
    """(gate and up, down) of as many layers as keep each other out of L2."""
    fmt = get_format(name)

    def stack(n: int, k: int) -> QuantizedTensor:
        values = torch.randn(EXPERTS, n, k, device=device).bfloat16() * 0.02
        amax = values.abs().amax((1, 2), keepdim=True) if fmt.per == "tensor" else None
        return fmt.quantize(values, amax=amax)

    first = (stack(2 * INNER, HIDDEN), stack(HIDDEN, INNER))
    count = cold_sets(first[0].nbytes + first[1].nbytes)
    return [first, *((stack(2 * INNER, HIDDEN), stack(HIDDEN, INNER)) for _ in range(count - 1))]


def layer(x: Tensor, ids: Tensor, weights: Tensor, up: QuantizedTensor, down: QuantizedTensor) -> Tensor:
    """(T, H) -> (T, H): what ``quant.experts`` does from bytes."""
    blocks = align_experts(ids, up)
    rows = gate_rows(grouped_w4a16_matmul(x, up, blocks))
    return weighted_sum(grouped_w4a16_matmul(rows, down, blocks), weights)


def time_layer(
    bench: Bench,
    layers: list[tuple[QuantizedTensor, QuantizedTensor]],
    tokens: int,
    name: str,
    residual: float | None,
) -> Row:
    """One row; bytes are those of the experts that were hit."""
    device = bench.device
    x = torch.randn(tokens, HIDDEN, device=device).bfloat16()
    logits = torch.randn(tokens, EXPERTS, device=device)
    weights, ids = logits.softmax(-1).topk(CHOICES, -1)
    weights = (weights / weights.sum(-1, keepdim=True)).bfloat16()
    hit = ids.unique().numel()
    moved = hit * sum(q.nbytes for q in layers[0]) // EXPERTS + 2 * tokens * HIDDEN * BF16_BYTES

    def call(up: QuantizedTensor, down: QuantizedTensor) -> Tensor:
        seen = x if residual is None else quantize_residual(x, residual)
        return layer(seen, ids, weights, up, down)

    flops = 2 * tokens * CHOICES * 3 * HIDDEN * INNER
    return bench.measure(
        f"experts {name}{'' if residual is None else f' + residual {residual}'}", f"{tokens} tokens",
        [lambda pair=pair: call(*pair) for pair in layers], nbytes=moved,
        flops=flops, l2="cold", backend="auto", note=f"{hit} of {EXPERTS} experts hit",
    )  # fmt: skip
