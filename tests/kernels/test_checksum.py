"""The kernel's checksum is the reference's number, for any length and any bits."""

import pytest
import torch

from lowbitrl.kernels.checksum import word_checksum

pytest.importorskip("triton")
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy, under the interpreter, on overflow


@pytest.mark.parametrize("count", [0, 1, 2047, 2048, 16385, 40_000])
def test_kernel_equals_reference(count, device):
    words = torch.randint(-(2**63), 2**63 - 1, (count,), device=device)
    assert torch.equal(word_checksum(words, "triton"), word_checksum(words, "reference"))


def test_a_moved_word_shows(device):
    words = torch.arange(1, 5000, device=device)
    swapped = words.clone()
    swapped[[7, 8]] = swapped[[8, 7]]
    assert word_checksum(words, "triton") != word_checksum(swapped, "triton")
