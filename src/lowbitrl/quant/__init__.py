"""Which tensors wear a format, and the modules that wear them."""

from lowbitrl.quant.apply import attachment, prepare, real_tokens
from lowbitrl.quant.export import export, wire
from lowbitrl.quant.plan import LayerPlan, Plan, resolve
from lowbitrl.quant.recipe import PRECISIONS, Recipe

__all__ = [
    "PRECISIONS",
    "LayerPlan",
    "Plan",
    "Recipe",
    "attachment",
    "export",
    "prepare",
    "real_tokens",
    "resolve",
    "wire",
]
