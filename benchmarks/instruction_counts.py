"""Instructions an element of the quantizing kernels, from sm90 machine code; needs Triton, no GPU.

    python benchmarks/instruction_counts.py

An H200 issues 132 * 4 warp instructions a clock. Over so many instructions an element that is the time below
which no launch of theirs can go, whatever the memory does.
"""

from __future__ import annotations

import collections
import os
import re
import subprocess
import tempfile
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia import __file__ as nvidia
from triton.compiler import ASTSource

from lowbitrl.kernels import nvfp4_triton, residual_triton
from lowbitrl.kernels.nvfp4_triton import warps_for

TYPES = {
    "x_ptr": "*bf16", "out_ptr": "*bf16", "real_ptr": "*u8", "mask_ptr": "*u8", "qdata_ptr": "*u8", "scale_ptr": "*u8",
    "globals_ptr": "*fp32", "partial_ptr": "*fp32", "amax_ptr": "*fp32", "global_ptr": "*fp32",
}  # fmt: skip
ALU_PIPE = (
    "FMNMX",
    "LOP3",
    "VIMNMX",
    "VIMNMX3",
    "ISETP",
    "FSETP",
    "FSEL",
    "SEL",
    "PRMT",
    "SHF",
    "VIADD",
    "LEA",
)
ISSUE_PER_SECOND = 132 * 4 * 32 * 1.98e9
COPY_BYTES_PER_SECOND = 4.3e12


def machine_code(kernel, constants: dict, warps: int) -> list[str]:
    """Opcodes of a kernel compiled for sm90, arguments divisible by 16."""
    names = kernel.arg_names
    signature = {name: "constexpr" if name in constants else TYPES.get(name, "i32") for name in names}
    aligned = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if name not in constants}
    source = ASTSource(kernel, signature, {(names.index(k),): v for k, v in constants.items()}, aligned)
    target, options = GPUTarget("cuda", 90, 32), {"num_warps": warps, "enable_fp_fusion": False}
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(triton.compile(source, target=target, options=options).asm["cubin"])
        cubin.flush()
        tools = Path(nvidia).parent / "bin"
        command = [tools / "cuobjdump", "--dump-sass", cubin.name]
        path = {**os.environ, "PATH": f"{tools}:{os.environ['PATH']}"}
        sass = subprocess.run(command, capture_output=True, text=True, check=True, env=path).stdout
    return re.findall(r"/\*[0-9a-f]{4}\*/\s+(?:@!?U?P\d+ )?([A-Z0-9]+)", sass)


def main() -> None:
    """A line a kernel: instructions an element, of them on the half-rate pipe, and the share they allow."""
    plain = {"FLOOR": False, "ENCODE": False, "REVERSE": False}
    row = {"ROWS": 1, "COLUMNS": 8192, "PER_ROW": True} | plain
    weight = {"ROWS": 8, "COLUMNS": 512, "PER_ROW": False} | plain | {"FLOOR": True, "REVERSE": True}
    cases = {
        "NVFP4 of a weight, amax known": (nvfp4_triton.nvfp4_kernel, weight),
        "NVFP4 per token": (nvfp4_triton.nvfp4_kernel, row),
        "residual, all channels": (residual_triton.token_kernel, {"COLUMNS": 8192, "SELECT": False}),
        "residual, long batch: scores": (residual_triton.run_kernel, {"COLUMNS": 8192, "MASKED": False}),
        "residual, long batch: repair": (residual_triton.repair_kernel, {"ROWS": 8, "COLUMNS": 512}),
    }
    for name, (kernel, constants) in cases.items():
        tile = constants.get("ROWS", 1) * constants["COLUMNS"]
        warps = warps_for(tile)
        opcodes = machine_code(kernel, constants, warps)
        each = len(opcodes) * 32 * warps / tile
        half = sum(collections.Counter(opcodes)[op] for op in ALU_PIPE) * 32 * warps / tile
        share = 4 / COPY_BYTES_PER_SECOND / (each / ISSUE_PER_SECOND)
        print(
            f"{name:32} {each:6.1f} an element, {half:5.1f} at half rate; copy bandwidth share at most {share:.2f}"
        )


if __name__ == "__main__":
    main()
