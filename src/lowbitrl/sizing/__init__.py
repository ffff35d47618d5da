"""What a run needs, from its model's config alone: memory of both sides, bytes of a step; no weights are read."""

from lowbitrl.sizing.memory import Estimate, Item, estimate
from lowbitrl.sizing.request import SizeRequest
from lowbitrl.sizing.shape import Shape, load_shape, shape_of
from lowbitrl.sizing.table import size_lines
from lowbitrl.sizing.weights import Weights

__all__ = [
    "Estimate",
    "Item",
    "Shape",
    "SizeRequest",
    "Weights",
    "estimate",
    "load_shape",
    "shape_of",
    "size_lines",
]
