"""Check and measure every variant of the 4-bit products on this GPU and write the table that ``backend="auto"`` reads.

    python benchmarks/choose_products.py [--out src/lowbitrl/kernels/w4a16_choices.json]

Weights are random; buffers rotate so that none is in the L2 cache when its turn comes. One row for each format,
shape and token count (grouped: rows a block): the fastest variant, share of K and overlap with the launch before, and
whether decoding the weight and calling cuBLAS beats it.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from lowbitrl.bench.timing import cold_sets, time_calls
from lowbitrl.formats import QuantizedTensor, get_format
from lowbitrl.kernels import w4a16_matmul
from lowbitrl.kernels.grouped_w4a16 import most_blocks
from lowbitrl.kernels.w4a16_choice import CHUNK, OVERLAPS, TABLE, TOKENS_A_TILE, Plan, Variant, built
from lowbitrl.kernels.w4a16_cuda import launch_w4a16
from lowbitrl.kernels.weights4 import Weight4, describe

FORMATS = ("nvfp4", "int4-g128")
DENSE = ((12288, 4096), (4096, 4096), (2048, 2048))
TOKENS = (8, 16, 32, 64, 128, 256, 512)
STACKS = ((1536, 2048), (2048, 768))
EXPERTS, CHOICES = 128, 8
# Tokens of a layer whose experts get about a block each.
BLOCKS = {8: 64, 16: 256, 32: 512, 64: 1024}
SAMPLES, FINALISTS = 9, 3
# Tokens from which decoding a weight for one product is tried.
FEW = 64
SPLITS = (1, 2, 3, 4, 6, 8)


def variants(tiles: int) -> list[Variant]:
    """Those built for so many token tiles, or the largest below."""
    found = built()
    widest = max(v.tiles for v in found if v.tiles <= tiles)
    return [v for v in found if v.tiles == widest or (tiles > 8 and v.tiles == 8)]


def random_weight(name: str, *shape: int) -> QuantizedTensor:
    """Random codes under the scales of ordinary weights."""
    fmt = get_format(name)
    values = torch.randn(*shape, device="cuda").bfloat16() * 0.02
    amax = values.abs().amax((-1, -2), keepdim=True) if len(shape) == 3 and fmt.per == "tensor" else None
    return fmt.quantize(values, amax=amax)


def copies(q: QuantizedTensor) -> list[Weight4]:
    """As many as keep each other out of L2."""
    sets = [{n: t.clone() for n, t in q.tensors().items()} for _ in range(cold_sets(q.nbytes))]
    return [describe(QuantizedTensor.from_tensors(s, q.shape, q.format)) for s in sets]


def fastest(calls_of, plans: Iterator[Plan]) -> tuple[float, Plan]:
    """(microseconds, plan) of the best: all are timed coarsely, the best of them again, in every overlap."""

    def time(plan: Plan, **how) -> float:
        return time_calls(calls_of(plan), l2="cold", **how).p50

    finals = sorted(plans, key=lambda plan: time(plan, samples=3, span=0.0))[:FINALISTS]
    finals = [plan._replace(overlap=overlap) for plan in finals for overlap in OVERLAPS]
    return min(((time(plan, samples=SAMPLES), plan) for plan in finals), key=lambda t: t[0])


def plans(tiles: int, k: int) -> Iterator[Plan]:
    """Variants by shares of K no shorter than what is in flight, each launched after the one before has ended."""
    for variant in variants(tiles):
        for splits in SPLITS:
            if splits == 1 or -(-k // CHUNK) // splits >= variant.round:
                yield Plan(variant, splits, OVERLAPS[0])


def row(
    name: str, grouped: bool, tokens: int, n: int, k: int, best, cublas: float | None, bf16: float | None
) -> dict:
    """One line of the table; cublas: decoding and the library's product, bf16: the product by decoded weights."""
    micros, (variant, splits, overlap) = best
    kind = "experts" if grouped else "dense"
    print(
        f"{name} {kind} {tokens} {n}x{k}: {micros:.2f} us {variant} {splits} overlap {overlap}; "
        f"cublas {cublas} bf16 {bf16}",
        flush=True,
    )
    wins = cublas is not None and cublas < micros
    least = min(micros, cublas or micros)
    shape = [variant.tiles, variant.rows, variant.warps, variant.stages, variant.grouped, variant.shares]
    return {
        "nvfp4": name == "nvfp4", "grouped": grouped, "tokens": tokens, "n": n, "k": k,
        "backend": "cublas" if wins else "cuda", "variant": shape, "splits": splits, "overlap": overlap,
        "beats_bf16": bf16 is not None and least < bf16,
    }  # fmt: skip


def dense_rows(name: str) -> Iterator[dict]:
    """Every dense shape and token count of a format."""
    for n, k in DENSE:
        q = random_weight(name, n, k)
        sets, values = copies(q), q.dequantize(torch.bfloat16)
        for tokens in TOKENS:
            x, out = (
                torch.randn(tokens, k, device="cuda").bfloat16(),
                torch.empty(tokens, n, device="cuda", dtype=torch.bfloat16),
            )

            def calls_of(plan, x=x, out=out, sets=sets):
                return [lambda w=w: launch(x, w, out, plan) for w in sets]

            best = fastest(calls_of, plans(-(-tokens // TOKENS_A_TILE), k))
            decoding = by_cublas(x, q) if tokens >= FEW else None
            yield row(name, False, tokens, n, k, best, decoding, by_values(x, values))


def by_cublas(x: Tensor, q: QuantizedTensor) -> float:
    """Microseconds of decoding and the library's product."""
    sets = [
        QuantizedTensor.from_tensors({n: t.clone() for n, t in q.tensors().items()}, q.shape, q.format)
        for _ in range(cold_sets(q.nbytes))
    ]
    return time_calls(
        [lambda w=w: w4a16_matmul(x, w, backend="cublas") for w in sets], l2="cold", samples=SAMPLES
    ).p50


def by_values(x: Tensor, values: Tensor) -> float:
    """Microseconds of the library's product by weights decoded before."""
    sets = [values.clone() for _ in range(cold_sets(2 * values.numel()))]
    return time_calls([lambda w=w: x @ w.T for w in sets], l2="cold", samples=SAMPLES).p50


def launch(x: Tensor, w: Weight4, out: Tensor, plan: Plan, **grouped) -> None:
    """One product."""
    launch_w4a16(x, w.codes, w.scale, w.global_scale, None, None, out, w.group, w.nvfp4, plan=plan, **grouped)


def grouped_rows(name: str) -> Iterator[dict]:
    """Every stack and block of a format, under random routing."""
    for n, k in STACKS:
        sets = copies(random_weight(name, EXPERTS, n, k))
        for block, tokens in BLOCKS.items():
            total = tokens * CHOICES
            ids = torch.rand(tokens, EXPERTS, device="cuda").topk(CHOICES, -1).indices.reshape(-1).int()
            assert most_blocks(total, EXPERTS, block)
            slots, owners = torch.ops.lowbitrl.align_experts(ids, EXPERTS, block, True)
            per_row = CHOICES if n < k else 1
            x = torch.randn(total // per_row, k, device="cuda").bfloat16()
            out = torch.empty(total, n, device="cuda", dtype=torch.bfloat16)
            where = {"slots": slots, "experts": owners, "block": block, "slots_per_row": per_row}

            def calls_of(plan, x=x, out=out, where=where, sets=sets):
                return [lambda w=w: launch(x, w, out, plan, **where) for w in sets]

            own = (p for p in plans(block // TOKENS_A_TILE, k) if p.variant.tiles * TOKENS_A_TILE == block)
            yield row(name, True, block, n, k, fastest(calls_of, own), None, None)


def check_variants() -> None:
    """Every variant against the reference, before any is timed; the table is what models trust.

    Raises:
        ValueError: a result is further from the reference than one BF16 rounding of it.
    """
    for name in FORMATS:
        for variant in {v for tiles in (1, 2, 4, 8, 16) for v in variants(tiles)}:
            q = random_weight(name, variant.height + 8, 1152)
            x = torch.randn(variant.tiles * TOKENS_A_TILE + 3, 1152, device="cuda").bfloat16()
            wanted = w4a16_matmul(x, q, backend="reference").float()
            for splits, overlap in itertools.product((1, 2, 4), OVERLAPS):
                out = torch.full_like(wanted, float("nan"), dtype=torch.bfloat16)
                launch(x, describe(q), out, Plan(variant, splits, overlap))
                error = (out.float() - wanted).abs() - 2**-7 * wanted.abs() - 1e-5 * wanted.abs().amax()
                if not bool((error <= 0).all()):
                    raise ValueError(
                        f"{name} {variant} splits {splits} differs from the reference; do not use it"
                    )


def main() -> None:
    """Measure, print as it goes, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=TABLE)
    out = parser.parse_args().out
    torch.manual_seed(0)
    check_variants()
    rows = [r for name in FORMATS for rows_of in (dense_rows, grouped_rows) for r in rows_of(name)]
    head = {"made_by": "python benchmarks/choose_products.py", "gpu": torch.cuda.get_device_name()}
    lines = ",\n  ".join(json.dumps(r) for r in rows)
    out.write_text(
        f'{{"made_by": {json.dumps(head["made_by"])}, "gpu": {json.dumps(head["gpu"])}, "rows": [\n  {lines}\n]}}\n'
    )


if __name__ == "__main__":
    main()
