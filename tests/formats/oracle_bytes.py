"""Reading tests/oracle: tensors made by the named libraries (see its README)."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

FOLDER = Path(__file__).parents[1] / "oracle"

NVFP4_CASES = (
    "rand_bf16", "rand_fp32", "ties_scale1", "zero_blocks", "outlier_1e4", "outlier_1e6_subnormal_scales",
    "outlier_3e7_scale_underflow", "all_equal_bf16", "all_zero", "tiny_1e-30", "fp32_subnormal",
    "static_sat", "static_loose",
)  # fmt: skip
"""Every finite case of nvfp4_inputs; "nan" and "inf" are records of what libraries do, not contracts."""


@cache
def load(name: str) -> dict[str, Tensor]:
    """The tensors of one oracle file."""
    return load_file(FOLDER / f"{name}.safetensors")


def nvfp4_input(case: str) -> tuple[Tensor, Tensor | None]:
    """(x, static amax or None) of one NVFP4 case."""
    inputs = load("nvfp4_inputs")
    return inputs[case], inputs.get(f"{case}.amax")


def positive_zero(packed: Tensor) -> Tensor:
    """Packed E2M1 codes with -0 (code 8) made +0: which libraries keep a zero's sign differs."""
    low, high = packed & 15, packed >> 4
    low, high = torch.where(low == 8, 0, low), torch.where(high == 8, 0, high)
    return low | (high << 4)


def assert_same(ours: Tensor, theirs: Tensor, what: str) -> None:
    """Bitwise equality that says how many entries differ and where the first one is."""
    assert ours.shape == theirs.shape, f"{what}: shape {tuple(ours.shape)} != {tuple(theirs.shape)}"
    differ = (ours != theirs).nonzero()
    if len(differ):
        at = tuple(differ[0].tolist())
        pair = f"{ours[at].item()} != {theirs[at].item()}"
        raise AssertionError(f"{what}: {len(differ)}/{ours.numel()} differ, first at {at}: {pair}")
