"""The kernel's checksums are the reference's numbers, for any length and any bits."""

import pytest
import torch

from lowbitrl.kernels.checksum import byte_checksums

pytest.importorskip("triton")
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy, under the interpreter, on overflow

LENGTHS = [0, 1, 7, 8, 9, 4, 8 * 2047, 8 * 2048 + 3, 8 * 16385, 8 * 40_000 + 7]


def noise(count, device):
    return torch.randint(0, 256, (count,), dtype=torch.uint8, device=device)


def test_all_tensors_of_a_publication_in_one_launch_equal_the_reference(device):
    tensors = [noise(count, device) for count in LENGTHS]
    assert byte_checksums(tensors, "triton").tolist() == byte_checksums(tensors, "reference").tolist()


def test_the_number_is_the_one_written_down():
    # One word of value 5, and a tail of bytes 2 and 3: 31 * (5 ^ 0) * 1 + 2 * 1 + 3 * 2.
    raw = torch.tensor([5, 0, 0, 0, 0, 0, 0, 0, 2, 3], dtype=torch.uint8)
    assert byte_checksums([raw], "reference").tolist() == [31 * 5 + 8]


def test_dtypes_strides_and_odd_offsets_are_read_as_their_bytes(device):
    base = noise(4096, device)
    odd = [base[3:3000], base.view(64, 64).T, base.view(torch.bfloat16)[1:], base.view(torch.float32)[5]]
    copies = [one.contiguous().clone() for one in odd]
    assert byte_checksums(odd, "triton").tolist() == byte_checksums(copies, "reference").tolist()


def test_a_moved_word_shows(device):
    words = torch.arange(1, 5000, device=device)
    swapped = words.clone()
    swapped[[7, 8]] = swapped[[8, 7]]
    first, second = byte_checksums([words, swapped], "triton").tolist()
    assert first != second


def test_nothing_to_sum_is_no_launch(device):
    assert byte_checksums([]).tolist() == []
    assert byte_checksums([noise(0, device)], "triton").tolist() == [0]
