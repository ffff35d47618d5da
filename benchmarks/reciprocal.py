"""rcp.approx.ftz.f32 against the IEEE reciprocal, over all mantissas: a table of differences in the last place.

    python benchmarks/reciprocal.py --out results/h200-kernels

Engines that quantize NVFP4 with "fast maths" use this instruction, so how often and how far it is off says how
often their scales can differ from ours. Needs CUDA. Also checks that the kernels' division (div.rn.f32) is IEEE.
"""

from __future__ import annotations

import argparse
import csv
from pathlib import Path

import torch
import triton
import triton.language as tl

from lowbitrl.bench.record import current_commit, software

MANTISSAS = 1 << 23
# Biased exponents: the smallest and largest whose reciprocal is normal, and around 1.
EXPONENTS = (1, 64, 126, 127, 128, 129, 190, 252)


@triton.jit
def reciprocal_kernel(x_ptr, approximate_ptr, divided_ptr, BLOCK: tl.constexpr):
    """Both reciprocals of BLOCK numbers."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at)
    fast = tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, True, 1)
    tl.store(approximate_ptr + at, fast)
    tl.store(divided_ptr + at, tl.div_rn(tl.full(x.shape, 1.0, tl.float32), x))


def reciprocals(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(rcp.approx.ftz, div.rn, IEEE from fp64) of fp32 numbers, a multiple of 1024 of them."""
    fast, divided = torch.empty_like(x), torch.empty_like(x)
    reciprocal_kernel[(x.numel() // 1024,)](x, fast, divided, BLOCK=1024)
    # fp64's 53 bits are more than twice 24 and two: rounding twice gives the correctly rounded quotient.
    return fast, divided, (1.0 / x.double()).float()


def differences(exponent: int) -> dict[int, int]:
    """Ulps that rcp.approx is off by -> how many of the 2^23 mantissas under this exponent."""
    mantissa = torch.arange(MANTISSAS, dtype=torch.int32, device="cuda")
    fast, divided, exact = reciprocals(((exponent << 23) | mantissa).view(torch.float32))
    assert torch.equal(divided.view(torch.int32), exact.view(torch.int32)), "div.rn.f32 is not IEEE here"
    off, count = (fast.view(torch.int32) - exact.view(torch.int32)).unique(return_counts=True)
    return dict(zip(off.tolist(), count.tolist(), strict=True))


def main() -> None:
    """Write reciprocal.csv: a line for each exponent and difference."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    out = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    six = reciprocals(torch.full((1024,), 6.0, device="cuda"))
    print(
        "rcp.approx(6)", hex(int(six[0].view(torch.int32)[0])), "IEEE", hex(int(six[2].view(torch.int32)[0]))
    )
    with (out / "reciprocal.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["biased_exponent", "ulp_off", "count", "share", *software(), "commit"])
        for exponent in EXPONENTS:
            for off, count in differences(exponent).items():
                share = round(count / MANTISSAS, 7)
                writer.writerow([exponent, off, count, share, *software().values(), current_commit()])
                print(exponent, off, count)


if __name__ == "__main__":
    main()
