"""Dense 4-bit products of one layer, (N, K) = (12288, 4096), beside cuBLAS in BF16, Marlin and humming."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from lowbitrl.formats import QuantizedTensor, get_format
from lowbitrl.kernels import quantize_residual, w4a16_matmul, w8a8_matmul, why_unavailable

from . import peers
from .record import Bench, Row
from .timing import cold_sets

N, K = 12288, 4096
TOKENS = (1, 4, 16, 32, 64, 128, 256, 1024, 4096)
FORMATS = ("nvfp4", "int4-g128")
# (tokens, least speed over cuBLAS in BF16)
GOALS = ((1, 2.5), (4, 2.5), (16, 2.5), (64, 2.0), (4096, 0.85))
SLOWER_THAN_BEST_PEER = 1.05
RESIDUAL, REPAIRED_TOKENS, REPAIRED_OVER_W4A16 = 0.5, 64, 1.1
BF16_BYTES = 2
OURS = "auto"


def run(bench: Bench) -> None:
    """Rows of every product and token count; findings against the goals."""
    device = bench.device
    values = torch.randn(N, K, device=device).bfloat16() * 0.02
    x = {m: torch.randn(m, K, device=device).bfloat16() for m in TOKENS}
    for m in TOKENS:
        time_bf16(bench, values, x[m])
    for name in FORMATS:
        time_ours(bench, values, x, name)
        time_peers(bench, values, x, name)
        if name == "nvfp4":
            time_repaired(bench, values, x[REPAIRED_TOKENS], name)
        judge(bench, name)
    for kind in ("fp8", "int8"):
        time_w8a8(bench, values, x, kind)


def judge(bench: Bench, name: str) -> None:
    """Findings on a format from the rows there are, of a run that was cut off too."""
    plain, ours = times(bench.rows, "bf16", {"cublas"}), times(bench.rows, f"w4a16 {name}", {OURS})
    others = {row.backend for row in bench.rows if row.op == f"w4a16 {name}"} - {OURS}
    product = f"W4A16 {name} K={K} N={N}"
    for m, least in GOALS:
        bench.find(f"{product}, {m} tokens, speed over cuBLAS BF16", plain[m] / ours[m], at_least=least)
    whose = "the best peer's" if len(others) > 1 else f"{' '.join(others)}'s"
    for m, best in times(bench.rows, f"w4a16 {name}", others).items():
        bench.find(f"{product}, {m} tokens, time over {whose}", ours[m] / best, at_most=SLOWER_THAN_BEST_PEER)
    for m, repaired in times(bench.rows, f"w4a4 {name} + residual {RESIDUAL}", {OURS}).items():
        what = f"emulated W4A4 + residual {RESIDUAL} {name} K={K} N={N}, {m} tokens, time over W4A16"
        bench.find(what, repaired / ours[m], at_most=REPAIRED_OVER_W4A16)


def times(rows: Sequence[Row], op: str, backends: Collection[str]) -> dict[int, float]:
    """The fastest backend's microseconds by token count."""
    best: dict[int, float] = {}
    for row in rows:
        if row.op == op and row.backend in backends:
            m = int(row.shape.split("x")[0])
            best[m] = min(row.p50, best.get(m, row.p50))
    return best


def time_bf16(bench: Bench, values: Tensor, x: Tensor) -> None:
    """The plain product."""
    m, moved = x.shape[0], values.numel() * BF16_BYTES
    sets = [values.clone() for _ in range(cold_sets(moved))]
    bench.measure(
        "bf16", shape(m), [lambda w=w: x @ w.T for w in sets], nbytes=moved + io_bytes(m), flops=flops(m), l2="cold",
        backend="cublas",
    )  # fmt: skip


def time_ours(bench: Bench, values: Tensor, x: dict[int, Tensor], name: str) -> None:
    """``backend="auto"``, by token count."""
    q = get_format(name).quantize(values)
    sets = [copy_of(q) for _ in range(cold_sets(q.nbytes))]
    for m, rows in x.items():
        calls = [lambda w=w, rows=rows: w4a16_matmul(rows, w) for w in sets]
        bench.measure(
            f"w4a16 {name}", shape(m), calls, nbytes=q.nbytes + io_bytes(m), flops=flops(m), l2="cold", backend=OURS
        )  # fmt: skip


def time_repaired(bench: Bench, values: Tensor, x: Tensor, name: str) -> None:
    """Both FP4 passes over the activations and the product."""
    q = get_format(name).quantize(values)
    sets = [copy_of(q) for _ in range(cold_sets(q.nbytes))]
    m = x.shape[0]
    bench.measure(
        f"w4a4 {name} + residual {RESIDUAL}", shape(m),
        [lambda w=w: w4a16_matmul(quantize_residual(x, RESIDUAL), w) for w in sets],
        nbytes=q.nbytes + io_bytes(m), flops=flops(m), l2="cold", backend=OURS,
    )  # fmt: skip


def time_peers(bench: Bench, values: Tensor, x: dict[int, Tensor], name: str) -> None:
    """Those that are installed, by token count."""
    q = get_format(name).quantize(values)
    makers = {}
    if peers.why_not_marlin() is None:
        makers["marlin"] = lambda: peers.marlin(copy_of(q))
    if peers.why_not_humming() is None:
        makers["humming"] = lambda: peers.humming(copy_of(q))
    for backend, make in makers.items():
        sets = [make() for _ in range(cold_sets(q.nbytes))]
        for m, rows in x.items():
            bench.measure(
                f"w4a16 {name}", shape(m), [lambda f=f, rows=rows: f(rows) for f in sets],
                nbytes=q.nbytes + io_bytes(m), flops=flops(m), l2="cold", backend=backend,
            )  # fmt: skip


def time_w8a8(bench: Bench, values: Tensor, x: dict[int, Tensor], kind: str) -> None:
    """Rows of the 8-bit product, activations quantized before."""
    q = get_format(f"{kind}-channel").quantize(values)
    sets = [copy_of(q) for _ in range(cold_sets(q.nbytes))]
    for m, rows in x.items():
        codes = get_format(f"{kind}-token").quantize(rows)
        bench.measure(
            f"w8a8 {kind}", shape(m), [lambda w=w, codes=codes: w8a8_matmul(codes, w) for w in sets],
            nbytes=q.nbytes + io_bytes(m), l2="cold", backend="auto",
            note="" if why_unavailable("torch") is None else "no torch product here",
        )  # fmt: skip


def copy_of(q: QuantizedTensor) -> QuantizedTensor:
    """The same bytes elsewhere."""
    return QuantizedTensor.from_tensors({n: t.clone() for n, t in q.tensors().items()}, q.shape, q.format)


def shape(tokens: int) -> str:
    """How rows call the product."""
    return f"{tokens}x{K}x{N}"


def io_bytes(tokens: int) -> int:
    """Activations read and written."""
    return tokens * (K + N) * BF16_BYTES


def flops(tokens: int) -> int:
    """Operations of the product."""
    return 2 * tokens * K * N
