"""Quantized checkpoints on disk: written for other engines, and read from them."""

from lowbitrl.checkpoints.read import QuantizedCheckpoint, load_quantized
from lowbitrl.checkpoints.write import WrittenCheckpoint, quantize_checkpoint, write_dense, write_quantized

__all__ = [
    "QuantizedCheckpoint",
    "WrittenCheckpoint",
    "load_quantized",
    "quantize_checkpoint",
    "write_dense",
    "write_quantized",
]
