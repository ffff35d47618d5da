"""What each launch of the CUDA residual costs, started one after the other or early; equality is checked first.

    python benchmarks/residual_launches.py

For a shape: microseconds of its first launch, of its first two, ... of all, and of all with ``EARLY_START``, beside the
copy of its bytes. Decode sizes are warm in L2, the rest is cold.
"""

from __future__ import annotations

import ctypes
from functools import partial

import torch
from torch import Tensor

from lowbitrl.bench.ceilings import limit_microseconds
from lowbitrl.bench.timing import cold_sets, time_calls
from lowbitrl.formats import get_format
from lowbitrl.formats.residual import compensate
from lowbitrl.kernels import residual_cuda
from lowbitrl.kernels.cuda_library import address, stream

SHAPES = tuple((rows, width) for width in (2048, 7168) for rows in (1, 16, 64, 256, 4096, 16384))
FRACTION = 0.5
CHECKED_ROWS = 700


def run(plan: tuple[residual_cuda.Launch, ...], x: Tensor, work: residual_cuda.Workspace) -> Tensor:
    """Part of a plan; what it computes is only whole if the plan is."""
    out = torch.empty_like(x)
    rows, width = x.shape
    pointers = (address(x), address(out), address(None), *work.addresses())
    sizes = (
        rows, width // residual_cuda.BLOCK, int(width * FRACTION), ctypes.c_int64(x.stride(0)),
        int(residual_cuda.EARLY_START),
    )  # fmt: skip
    for step in plan:
        residual_cuda.run(step, pointers, sizes, stream(x.device))
    return out


def unlike(rows: int, width: int) -> int:
    """Elements that differ from the reference, over twenty calls that reuse each other's memory."""
    wrong = 0
    for _ in range(20):
        x = torch.randn(min(rows, CHECKED_ROWS), width, device="cuda", dtype=torch.bfloat16)
        got = residual_cuda.launch_residual(x, int(width * FRACTION), "batch", None)
        wrong += int((got != compensate(x, get_format("nvfp4-token"), FRACTION, "batch")).sum())
    return wrong


def microseconds(rows: int, width: int) -> list[float]:
    """Of the plan's first launch, first two, ... all."""
    decode = rows <= residual_cuda.DECODE_TOKENS
    count = 1 if decode else cold_sets(4 * rows * width)
    inputs = [torch.randn(rows, width, device="cuda", dtype=torch.bfloat16) for _ in range(count)]
    device = inputs[0].device
    plan = residual_cuda.plan_for(
        rows, width // residual_cuda.BLOCK, every=False, scope="batch",
        programs=residual_cuda.multiprocessors(device),
    )  # fmt: skip
    work = residual_cuda.workspace(rows, width, not decode, device)
    # A plan's second launch alone would wait for a counter that its first resets: prefixes only.
    return [
        time_calls([partial(run, plan[:n], x, work) for x in inputs], l2="warm" if decode else "cold").p50
        for n in range(1, len(plan) + 1)
    ]


def main() -> None:
    """A line a shape."""
    for rows, width in SHAPES:
        line = [f"({rows}, {width})", f"copy {limit_microseconds('cuda', 4 * rows * width):.1f}"]
        for early in (False, True):
            residual_cuda.EARLY_START = early
            times = " ".join(f"{t:.1f}" for t in microseconds(rows, width))
            line.append(f"{'early' if early else 'in turn'} {times} (unlike: {unlike(rows, width)})")
        print("; ".join(line), flush=True)


if __name__ == "__main__":
    main()
