"""Quantizers next to copy bandwidth: activations with the residual pass, the learner's weights, publishing.

Bytes are the fewest the op must move: each input read once, each output written once, whatever a kernel
really reads. Activations of decode size are warm in L2, as the op before leaves them; everything else is cold.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from lowbitrl.formats import get_format
from lowbitrl.formats.residual import Scope, compensate
from lowbitrl.kernels import absmax, fake_quantize, quantize, quantize_residual
from lowbitrl.kernels.backend import REFERENCE, TRITON
from lowbitrl.kernels.checksum import byte_checksums
from lowbitrl.kernels.quantize import quantizer_backend
from lowbitrl.kernels.residual import residual_backend

from .record import Bench, Row
from .timing import Call, cold_sets

ACTIVATIONS = "nvfp4-token"
WIDTHS = (2048, 7168)
DECODE, PREFILL = (1, 16, 64, 256), (4096, 8192, 16384)
WEIGHT = (8192, 8192)
WEIGHT_FORMATS = ("nvfp4", "fp8-channel", "fp8-block", "int8-channel", "int4-g128", "mxfp4", "mxfp8")
# Qwen3-30B-A3B: gate and up of a layer's 128 experts.
EXPERTS = (128, 1536, 2048)
SMALL = {"activations": ((4, 64), (64,)), "weight": (256, 256), "experts": (4, 64, 128)}


def run(bench: Bench) -> None:
    """Activations, weights, publishing; tiny shapes without CUDA, where the reference runs."""
    on_cuda = bench.device == "cuda"
    _weights(bench, WEIGHT if on_cuda else SMALL["weight"])
    _publish(bench, EXPERTS if on_cuda else SMALL["experts"])
    _activations(bench, on_cuda)


def _activations(bench: Bench, on_cuda: bool) -> None:
    tokens, widths = (DECODE + PREFILL, WIDTHS) if on_cuda else SMALL["activations"]
    for width in widths:
        for rows in tokens:
            _check(rows, width, bench.device)
            plain = _activation_row(bench, rows, width, 0.0, "batch")
            half = _activation_row(bench, rows, width, 0.5, "batch")
            token = _activation_row(bench, rows, width, 0.5, "token")
            whole = _activation_row(bench, rows, width, 1.0, "batch")
            if on_cuda and rows in (64, *PREFILL):
                _activation_findings(bench, rows, width, plain, {"batch": half, "token": token, "all": whole})


def _activation_row(bench: Bench, rows: int, width: int, fraction: float, scope: Scope) -> Row:
    nbytes = rows * width * 4
    warm = rows in DECODE
    sets = 1 if warm else cold_sets(nbytes)
    inputs = [_gaussian((rows, width), bench.device) for _ in range(sets)]
    calls = [partial(quantize_residual, x, fraction, format=ACTIVATIONS, scope=scope) for x in inputs]
    fmt = get_format(ACTIVATIONS)
    if fraction:
        op, backend = "quantize_residual", residual_backend(inputs[0], fraction, format=fmt, scope=scope)
    else:
        op, backend = "fake_quantize", quantizer_backend("fake_quantize", inputs[0], fmt)
    return bench.measure(
        op, f"({rows}, {width})", calls, nbytes=nbytes, l2="warm" if warm else "cold", backend=backend,
        note=f"residual {fraction:g} {scope}", samples=15,
    )  # fmt: skip


def _activation_findings(bench: Bench, rows: int, width: int, plain: Row, repaired: dict[str, Row]) -> None:
    for scope, row in repaired.items():
        what = f"quantize_residual ({rows}, {width}), scope {scope}"
        if rows == 64:
            bench.find(f"{what}: time", row.p50, at_most=15.0, unit="us")
        else:
            bench.find(f"{what}: share of copy bandwidth", row.ratio, at_least=0.7)
        if scope == "batch":
            bench.find(f"{what}: residual 0.5 over plain quantize", row.p50 / plain.p50, at_most=1.6)


def _weights(bench: Bench, shape: tuple[int, ...]) -> None:
    count = shape[0] * shape[1]
    weights = [_gaussian(shape, bench.device) for _ in range(cold_sets(4 * count) + 1)]
    cold = partial(bench.measure, shape=str(shape), l2="cold", samples=15)

    def backend(op: str, name: str, amax: Tensor | None = None) -> str:
        return quantizer_backend(op, weights[0], get_format(name), amax)

    def requantize(name: str, calls: list[Call], remark: str = "", amax: Tensor | None = None) -> None:
        chosen = backend("fake_quantize", name, amax)
        row = cold("fake_quantize", calls=calls, nbytes=4 * count, note=f"{name}{remark}", backend=chosen)
        what = f"learner weight QDQ {name} {shape}{remark}: share of copy bandwidth"
        bench.find(what, row.ratio, at_least=0.7)

    for name in WEIGHT_FORMATS:
        requantize(name, [partial(fake_quantize, w, name) for w in weights])
        encoded = quantize(weights[0], name).nbytes
        calls: list[Call] = [partial(quantize, w, name) for w in weights]
        cold(
            "quantize", calls=calls, nbytes=2 * count + encoded, note=name, backend=backend("quantize", name)
        )
    peaks = [absmax(w) for w in weights]
    known: list[Call] = [
        partial(fake_quantize, w, "nvfp4", amax=p) for w, p in zip(weights, peaks, strict=True)
    ]
    requantize("nvfp4", known, ", amax known", peaks[0])
    calls = [partial(absmax, w) for w in weights]
    cold("absmax", calls=calls, nbytes=2 * count, backend=TRITON if bench.device == "cuda" else REFERENCE)


def _publish(bench: Bench, shape: tuple[int, ...]) -> None:
    """Encode a stack with a maximum an expert, and checksum the bytes; counted: weights in, bytes out."""
    stacks = [_gaussian(shape, bench.device) for _ in range(2)]

    def publish(stack: Tensor) -> Tensor:
        return byte_checksums(list(quantize(stack, "nvfp4", parts=shape[0]).tensors().values()))

    nbytes = 2 * stacks[0].numel() + quantize(stacks[0][:1], "nvfp4").nbytes * shape[0]
    row = bench.measure(
        "publish",
        str(shape),
        [partial(publish, s) for s in stacks],
        nbytes=nbytes,
        l2="cold",
        backend=quantizer_backend("quantize", stacks[0], get_format("nvfp4")),
        note="nvfp4: amax, encode, checksum",
        samples=15,
    )
    bench.find(
        f"publish {shape} nvfp4, encode and checksum: share of copy bandwidth", row.ratio, at_least=0.5
    )


def _check(rows: int, width: int, device: str) -> None:
    """No time is recorded for a kernel that differs from its reference."""
    x = _gaussian((min(rows, 512), width), device)
    for scope in ("batch", "token"):
        got = quantize_residual(x, 0.5, scope=scope)  # type: ignore[arg-type]
        assert torch.equal(got, compensate(x, get_format(ACTIVATIONS), 0.5, scope))  # type: ignore[arg-type]


def _gaussian(shape: tuple[int, ...], device: str) -> Tensor:
    return torch.randn(shape, device=device, dtype=torch.bfloat16)
