"""vLLM's module names and the plan's: fused modules, and MoE blocks that are called otherwise on disk."""

from __future__ import annotations

from collections.abc import Mapping

from lowbitrl.quant import LayerPlan, Plan


class Names:
    """Looks up the plan's rows by vLLM's names.

    vLLM names modules as checkpoints do. transformers does too, save for the blocks of some mixtures of
    experts, whose names on disk the plan's stacks know.
    """

    def __init__(self, plan: Plan) -> None:
        self._by_name = plan.by_name
        self._stacks: dict[str, dict[str, LayerPlan]] = {}
        self._blocks: dict[str, str] = {}
        for row in plan.layers:
            if row.layout is not None:
                owner, _, leaf = row.name.rpartition(".")
                disk = row.layout.names[0].partition(".{}.")[0]
                self._stacks.setdefault(disk, {})[leaf] = row
                self._blocks[f"{disk.rpartition('.')[0]}."] = f"{owner.rpartition('.')[0]}."

    def published(self, name: str) -> str:
        """The learner's name of vLLM's parameter or module `name`."""
        for disk, block in self._blocks.items():
            if name.startswith(disk):
                return block + name.removeprefix(disk)
        return name

    def members(self, prefix: str, fused: Mapping[str, list[str]]) -> tuple[LayerPlan, ...]:
        """The rows of what is fused in the linear `prefix`, in order.

        Raises:
            ValueError: a matrix is not in the plan, or the plan treats fused ones differently.
        """
        parent, dot, leaf = self.published(prefix).rpartition(".")
        names = [parent + dot + member for member in fused.get(leaf, [leaf])]
        for name in names:
            if name not in self._by_name:
                raise ValueError(
                    f"vLLM serves {prefix}, made of {name}, which the plan does not know; the plan is of another "
                    "model, or vLLM fuses this architecture in a way that is not supported"
                )
        rows = tuple(self._by_name[name] for name in names)
        for row in rows[1:]:
            if _decision(row) != _decision(rows[0]):
                raise ValueError(
                    f"{row.name} and {rows[0].name} are one matrix in vLLM, but the plan treats them differently; "
                    "keep all of them in BF16 or none"
                )
        return rows

    def stacks(self, prefix: str) -> tuple[LayerPlan, LayerPlan]:
        """The rows of the experts `prefix`: (gate_up_proj, down_proj).

        Raises:
            ValueError: the plan has no such stacks, or in a layout that vLLM does not fuse.
        """
        found = self._stacks.get(prefix, {})
        both = (found.get("gate_up_proj"), found.get("down_proj"))
        if both[0] is None or both[1] is None:
            raise ValueError(
                f"vLLM serves the experts {prefix}, which the plan does not know as gate_up_proj and down_proj"
            )
        for row in both:
            assert row.layout is not None
            if row.layout.transposed or row.layout.interleaved:
                raise ValueError(f"{row.name}: transposed or interleaved stacks are not served by vLLM yet")
        return both[0], both[1]


def _decision(row: LayerPlan) -> tuple[object, ...]:
    # Formats may differ: int4 under FP8 activations depends on a matrix's shape.
    return row.weight is None, row.activation, row.residual
