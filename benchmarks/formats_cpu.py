"""CPU cost of quantizing one large BF16 tensor, beside the plainest pass over it.

    python benchmarks/formats_cpu.py [--elements 67108864] [--threads 1]

Prints one JSON object a line per format: seconds (best of a few), the ratio to ``plain`` (fp32 copy, amax of
every 16 columns, divide, round: what no block format can do without), and the peak of extra memory, results
included, in multiples of the input's bytes. The requirement: ratio <= 3, extra memory <= 3 for nvfp4.
"""

from __future__ import annotations

import argparse
import json
import platform
import resource
import subprocess
import sys
import time

import torch

FORMATS = (
    "nvfp4", "nvfp4-token", "fp8-channel", "fp8-token", "fp8-block", "int8-channel", "int4-g128", "mxfp4", "mxfp8",
)  # fmt: skip


def plain(x: torch.Tensor) -> list[torch.Tensor]:
    """amax and round in fp32, 64 rows at a time so that it is not slow for want of cache."""
    out = []
    for rows in x.split(64):
        blocks = rows.float().unflatten(-1, (-1, 16))
        out.append((blocks / blocks.abs().amax(-1, keepdim=True)).round())
    return out


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def measure(what: str, elements: int, repeats: int) -> dict[str, float | str]:
    """Time and peak memory of one format; run in a process of its own, because the peak never falls."""
    from lowbitrl.formats import get_format

    x = torch.randn(elements // 4096, 4096, dtype=torch.bfloat16)
    run = plain if what == "plain" else get_format(what).quantize
    run(x[:64])
    before, seconds = peak_bytes(), []
    for _ in range(repeats):
        start = time.perf_counter()
        run(x)
        seconds.append(time.perf_counter() - start)
    extra = (peak_bytes() - before) / (x.numel() * x.element_size())
    return {"format": what, "seconds": min(seconds), "extra_memory": extra, "elements": x.numel()}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--elements", type=int, default=1 << 26)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", help="measure this one here instead of starting a process for each")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if args.only:
        print(json.dumps(measure(args.only, args.elements, args.repeats)))
        return
    baseline = 0.0
    for what in ["plain", *FORMATS]:
        command = [sys.executable, __file__, "--only", what, "--elements", str(args.elements)]
        command += ["--threads", str(args.threads), "--repeats", str(args.repeats)]
        row = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        baseline = baseline or row["seconds"]
        row |= {"ratio": row["seconds"] / baseline, "threads": args.threads, "torch": torch.__version__}
        print(json.dumps(row | {"machine": platform.processor() or platform.machine()}), flush=True)


if __name__ == "__main__":
    main()
