"""Which tensors wear a format, and the modules that wear them."""

from lowbitrl.quant.apply import (
    Attachment,
    attachment,
    calibrate,
    forget_bytes,
    observing,
    prepare,
    real_tokens,
    restore_scales,
    static_scales,
)
from lowbitrl.quant.export import export, wire
from lowbitrl.quant.plan import LayerPlan, Plan, resolve
from lowbitrl.quant.products import describe_products
from lowbitrl.quant.recipe import PRECISIONS, Recipe
from lowbitrl.quant.routing import agreement, recomputation, routing
from lowbitrl.quant.shards import whole

__all__ = [
    "PRECISIONS",
    "Attachment",
    "LayerPlan",
    "Plan",
    "Recipe",
    "agreement",
    "attachment",
    "calibrate",
    "describe_products",
    "export",
    "forget_bytes",
    "observing",
    "prepare",
    "real_tokens",
    "recomputation",
    "resolve",
    "restore_scales",
    "routing",
    "static_scales",
    "whole",
    "wire",
]
