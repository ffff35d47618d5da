"""Check and measure the quantizers of both backends on this GPU and write the table that ``backend="auto"`` reads.

    python benchmarks/choose_quantizers.py [--out src/lowbitrl/kernels/quantizer_choices.json]

A row for each op and shape: microseconds by the CUDA kernel and by Triton's, and the faster. Nothing is timed that
differs from the reference: such a backend's figure is null. Activations of decode size are warm in L2, as the op before
leaves them; the rest is cold.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from lowbitrl.bench.timing import cold_sets, time_calls
from lowbitrl.formats import Format, get_format
from lowbitrl.formats.residual import Scope, compensate
from lowbitrl.kernels import fake_quantize, quantize, quantize_residual
from lowbitrl.kernels.backend import TRITON
from lowbitrl.kernels.cuda_library import CUDA
from lowbitrl.kernels.quantizer_choice import TABLE
from lowbitrl.kernels.residual import table_name

TOKENS = (1, 16, 64, 256, 512, 4096, 16384)
WIDTHS = (2048, 7168)
WEIGHTS = ((2048, 2048), (8192, 8192))
# Gate and up of a layer of Qwen3-30B-A3B.
STACK = (128, 1536, 2048)
WARM_TOKENS = 512
CHECKED_ROWS = 700
SAMPLES = 5

Op = Callable[..., Tensor]


def cases() -> Iterator[tuple[str, tuple[int, ...], Op, Callable[[Tensor], Tensor]]]:
    """(name in the table, shape, op with ``backend=``, reference)."""
    tokens, weights = get_format("nvfp4-token"), get_format("nvfp4")
    kinds: tuple[tuple[float, Scope], ...] = ((0.5, "batch"), (0.5, "token"), (1.0, "batch"))
    for shape in itertools.product(TOKENS, WIDTHS):
        for fraction, scope in kinds:
            op = partial(quantize_residual, fraction=fraction, scope=scope)
            reference = partial(compensate, activation=tokens, fraction=fraction, scope=scope)
            yield table_name(*shape, fraction, scope), shape, op, reference
    for shape in WEIGHTS:
        yield "fake_quantize", shape, partial(fake_quantize, format="nvfp4"), weights.fake_quantize
        yield "quantize", shape, partial(codes, parts=1), lambda x: weights.quantize(x).qdata
    yield "quantize", STACK, partial(codes, parts=STACK[0]), partial(reference_codes, fmt=weights)


def reference_codes(stack: Tensor, fmt: Format) -> Tensor:
    """Codes of a stack, each matrix under its own maximum."""
    return fmt.quantize(stack, amax=stack.float().abs().amax((1, 2), keepdim=True)).qdata


def codes(x: Tensor, parts: int, backend: str) -> Tensor:
    """NVFP4 codes of a weight or a stack."""
    return quantize(x, "nvfp4", parts=parts, backend=backend).qdata


def microseconds(op: Op, shape: tuple[int, ...], backend: str) -> float:
    """Median time of one call."""
    warm = shape[0] <= WARM_TOKENS and len(shape) == 2
    count = 1 if warm else cold_sets(4 * torch.Size(shape).numel())
    inputs = [torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(count)]
    calls = [partial(op, x, backend=backend) for x in inputs]
    return round(time_calls(calls, l2="warm" if warm else "cold", samples=SAMPLES).p50, 2)


def measured(
    name: str, shape: tuple[int, ...], op: Op, reference: Callable[[Tensor], Tensor]
) -> dict[str, float | None]:
    """Microseconds by backend; None for one that differs from the reference."""
    checked = shape if len(shape) == 3 else (min(shape[0], CHECKED_ROWS), *shape[1:])
    x = torch.randn(checked, device="cuda", dtype=torch.bfloat16)
    took: dict[str, float | None] = {}
    for backend in (CUDA, TRITON):
        same = torch.equal(op(x, backend=backend), reference(x))
        took[backend] = microseconds(op, shape, backend) if same else None
        if not same:
            print(f"{name} {shape}: {backend} differs from the reference", flush=True)
    return took


def main(out: Path) -> None:
    """Measure every case and write the table."""
    rows = []
    for name, shape, op, reference in cases():
        took = measured(name, shape, op, reference)
        best = min((us, backend) for backend, us in took.items() if us is not None)[1]
        rows.append(
            {"op": name, "rows": torch.Size(shape[:-1]).numel(), "width": shape[-1], "backend": best, **took}
        )
        print(rows[-1], flush=True)
    lines = ",\n".join(json.dumps(row) for row in rows)
    made = f'"made_by": "python benchmarks/choose_quantizers.py", "gpu": "{torch.cuda.get_device_name()}"'
    out.write_text(f'{{{made}, "rows": [\n{lines}\n]}}\n')


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=TABLE)
    main(parser.parse_args().out)
