"""Low-bit number formats: the reference every kernel, exporter and engine is compared with, byte for byte.

Example, with a weight (N, K):

    fmt = get_format("nvfp4")
    q = fmt.quantize(weight)            # QuantizedTensor: codes and decode scales
    w_hat = q.dequantize(torch.bfloat16)
    w_fake = fmt.fake_quantize(weight)  # the same values, with a straight-through gradient
"""

from . import fp8, int4, int8, mx, nvfp4, nvfp4_rules  # noqa: F401  (importing registers the formats)
from .calibration import Calibrator
from .fake import fake_quantize
from .format import Format, QuantizedTensor, get_format, known_formats

__all__ = ["Calibrator", "Format", "QuantizedTensor", "fake_quantize", "get_format", "known_formats"]
