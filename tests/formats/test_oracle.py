"""Each named rule against the bytes its library made.

Exceptions, with reasons, are listed beside each rule; everything else must be equal to the last bit.
"""

from __future__ import annotations

import pytest
import torch
from oracle_bytes import NVFP4_CASES, assert_same, load, nvfp4_input, positive_zero

from lowbitrl.formats import get_format

# vLLM's emulation makes NaN of an all-zero tensor, and scale 448 of one too small for 2688 / amax; both
# decode to zeros here.
VLLM_RECORDS = ("all_zero", "fp32_subnormal")


@pytest.mark.parametrize("case", [c for c in NVFP4_CASES if c not in VLLM_RECORDS])
def test_our_activations_are_vllm_k3(case):
    x, amax = nvfp4_input(case)
    theirs = load("nvfp4_vllm_emu")
    q = get_format("nvfp4-tensor").quantize(x, amax=amax)
    assert q.global_scale is not None
    assert_same(positive_zero(q.qdata), positive_zero(theirs[f"{case}.packed"]), "codes")
    assert_same(q.scale.view(torch.uint8), theirs[f"{case}.scale"], "scales")
    assert_same(q.global_scale.view(1), 1 / theirs[f"{case}.global"], "global scale")
    assert_same(q.dequantize(), theirs[f"{case}.dequant"], "values")


@pytest.mark.parametrize("case", VLLM_RECORDS)
def test_records_decode_to_zero_here(case):
    x, amax = nvfp4_input(case)
    assert (get_format("nvfp4").quantize(x, amax=amax).dequantize() == 0).all()
