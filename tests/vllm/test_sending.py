"""The publisher's side of an update, without vLLM: buckets, and what crosses to another process."""

from __future__ import annotations

import torch

from lowbitrl.rollout.vllm.sending import buckets, on_host


def test_a_bucket_is_copied_whole_whatever_it_holds():
    whole = torch.arange(40, dtype=torch.uint8)
    bucket = {
        "codes": whole[:13], "the same codes": whole[:13], "scale": torch.randn(3, 5).to(torch.float8_e4m3fn),
        "global": torch.tensor(0.25), "weight": torch.randn(4, 3).bfloat16().t(), "none": torch.empty(0, 4),
    }  # fmt: skip
    copies = on_host(bucket)
    assert list(copies) == list(bucket)
    for name, tensor in bucket.items():
        assert copies[name].dtype == tensor.dtype
        assert torch.equal(copies[name].float(), tensor.float()), name
    assert len({t.untyped_storage().data_ptr() for t in copies.values() if t.numel()}) == 5, (
        "a file shares none"
    )


def test_buckets_hold_about_what_is_asked_for_and_at_least_one_tensor():
    stream = [(str(i), torch.zeros(size, dtype=torch.uint8)) for i, size in enumerate([30, 30, 90, 10, 50])]
    assert [[*bucket] for bucket in buckets(stream, 60)] == [["0", "1"], ["2"], ["3", "4"]]
