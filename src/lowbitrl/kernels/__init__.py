"""Speed: one op a file, every one equal to its reference, each with ``backend=``.

``<op>.py`` is the front door: what the op computes, which backends can, the torch custom op and its fake.
``<name>_triton.py`` holds Triton bodies and launchers, loaded at first use: nothing here imports Triton.
"""

from .backend import choose, known_backends, register_backend, why_unavailable
from .between_experts import gate_rows, weighted_sum
from .decode import decode
from .grouped_w4a16 import align_experts, grouped_w4a16_matmul
from .grouped_w8a8 import grouped_w8a8_matmul
from .quantize import absmax, fake_quantize, quantize
from .residual import quantize_residual
from .w4a4 import w4a4_matmul
from .w4a8 import w4a8_matmul
from .w4a16 import w4a16_matmul
from .w8a8 import w8a8_matmul

__all__ = [
    "absmax",
    "align_experts",
    "choose",
    "decode",
    "fake_quantize",
    "gate_rows",
    "grouped_w4a16_matmul",
    "grouped_w8a8_matmul",
    "known_backends",
    "quantize",
    "quantize_residual",
    "register_backend",
    "w4a4_matmul",
    "w4a8_matmul",
    "w4a16_matmul",
    "w8a8_matmul",
    "weighted_sum",
    "why_unavailable",
]
