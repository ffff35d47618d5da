"""A plan as vLLM carries it: the model's `quantization_config`, with the digest that proves it arrived whole."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from lowbitrl.quant import LayerPlan, Plan, Recipe
from lowbitrl.quant.stacks import StackLayout

QUANT_METHOD = "lowbitrl"


def to_config(plan: Plan) -> dict[str, Any]:
    """`hf_overrides={"quantization_config": to_config(plan)}`; JSON data."""
    return {"quant_method": QUANT_METHOD, **json.loads(json.dumps(plan.to_dict()))}


def to_file(plan: Plan, path: Path) -> dict[str, Any]:
    """As `to_config` for command lines: the rows in a file, their digest in the config."""
    path.write_text(json.dumps(plan.to_dict()))
    return {"quant_method": QUANT_METHOD, "plan_file": str(path.resolve()), "digest": plan.digest}


def from_config(config: dict[str, Any]) -> Plan:
    """Inverse of `to_config` and `to_file`.

    Raises:
        ValueError: rows are missing, or their digest is not the one that the config carries.
    """
    data = config
    if "plan_file" in config:
        data = json.loads(Path(config["plan_file"]).read_text()) | {"digest": config["digest"]}
    missing = {"recipe", "layers", "digest"} - data.keys()
    if missing:
        raise ValueError(
            f"quantization_config of {QUANT_METHOD} lacks {', '.join(sorted(missing))}; "
            "make it with lowbitrl.rollout.vllm.planned.to_config(plan)"
        )
    recipe = data["recipe"]
    keep = recipe.get("keep")
    plan = Plan(
        Recipe(**(recipe | {"keep": None if keep is None else tuple(keep)})),
        tuple(_layer(row) for row in data["layers"]),
    )
    if plan.digest != data["digest"]:
        raise ValueError(
            f"the plan's rows have digest {plan.digest}, the config says {data['digest']}: it was edited or "
            "written by another version; make it anew with planned.to_config(plan)"
        )
    return plan


def _layer(row: dict[str, Any]) -> LayerPlan:
    layout = row.get("layout")
    if layout is not None:
        layout = StackLayout(**(layout | {"names": tuple(layout["names"])}))
    return LayerPlan(**(row | {"shape": tuple(row["shape"]), "layout": layout}))
