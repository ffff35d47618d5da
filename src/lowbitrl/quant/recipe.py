"""What a person writes: which precision samples, how the learner follows, what stays in BF16.

A recipe names intentions and knows no model. `plan.resolve` turns it into one decision per
parameter and per activation site of a given model.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, get_args

from lowbitrl.formats.residual import Scope

Alignment = Literal["bf16", "weights", "full"]
Site = Literal["attention", "w13", "w2", "other"]
Kernels = Literal["learner", "low-bit"]
"""What a rollout multiplies with: the learner's products, or kernels that read low-bit bytes (`quant.products`)."""


@dataclass(frozen=True)
class Precision:
    """The weight and activation formats a rollout name stands for (None: left in BF16)."""

    weight: str | None
    activation: str | None


PRECISIONS: dict[str, Precision] = {
    "bf16": Precision(None, None),
    "fp8": Precision("fp8-channel", "fp8-token"),
    "fp8-block": Precision("fp8-block", "fp8-1x128"),
    "int8": Precision("int8-channel", "int8-token"),
    "int4": Precision("int4-g128", None),
    "int4-fp8": Precision("int4-g128", "fp8-token"),
    "nvfp4": Precision("nvfp4", "nvfp4-token"),
    "nvfp4-w4a16": Precision("nvfp4", None),
    "nvfp4-w16a4": Precision(None, "nvfp4-token"),
    "nvfp4-fp8": Precision("nvfp4", "fp8-token"),
    "mxfp4": Precision("mxfp4", "mxfp4"),
    "mxfp8": Precision("mxfp8", "mxfp8"),
}
STATIC = {"nvfp4-token": "nvfp4-tensor", "fp8-token": "fp8-tensor:vllm"}
"""Dynamic activation format -> the one under a calibrated scale. A plan that names the latter is static."""
FP4_ACTIVATIONS = ("nvfp4-token", "nvfp4-tensor", "mxfp4")
ScaleSource = Literal["token", "static"]


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """One precision contract for learner and rollout.

    Attributes:
        rollout: precision of the sampling policy, a key of `PRECISIONS`.
        learner: "bf16" (no alignment, the naive baseline), "weights" (QUADS: the same weight
            bytes, activations untouched) or "full" (QaRL: the rollout's whole arithmetic).
        residual: fraction of input channels whose activation error gets a second FP4 pass
            (QUADS eq. 21 and 24; k% as 0..1). Needs FP4 activations. It holds at every site of a
            dense model, and at "w13" alone in a mixture of experts (QUADS section 3.3).
        residual_sites: fractions of single sites in place of those: "w13" (input of gate and up,
            routed, shared or dense), "w2" (input of down), "attention" (inputs of its projections),
            "other". Sites not named keep their default.
        residual_scope: whether the channels are chosen per "batch" (QUADS: column norms over
            the real tokens of the forward pass, so a completion depends on its batch) or per
            "token". Unset: "batch", and "token" under `learner="full"`, where a batch-wide
            choice would differ between the two sides by construction.
        activation_scale: "token", every row measures its own (the default), or "static": one
            maximum a site, seen by the learner in the last step and shipped with the weights, the
            scale that W4A4 and FP8 checkpoints of other engines hold. FP4 and FP8 activations of
            rollouts "nvfp4", "nvfp4-w16a4", "fp8", "int4-fp8" and "nvfp4-fp8" have one.
        keep: glob patterns over whole module names whose weights stay in BF16 on both sides;
            `*` crosses dots. Unset: the output head and MoE routers. An empty tuple keeps
            nothing. A pattern that matches no module is an error when the plan is made.

    Raises:
        ValueError: an unknown name or a combination that cannot mean anything, with the remedy.

    Example:
        >>> Recipe(rollout="nvfp4", learner="weights", residual=0.5).scope
        'batch'
    """

    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012  (read by pydantic where a config holds a recipe)

    rollout: str = "bf16"
    learner: Alignment = "weights"
    residual: float = 0.0
    residual_sites: dict[Site, float] | None = field(default=None, hash=False)
    residual_scope: Scope | None = None
    activation_scale: ScaleSource = "token"
    keep: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        _check_choice("rollout", self.rollout, tuple(PRECISIONS))
        _check_choice("learner", self.learner, get_args(Alignment))
        if self.residual_scope is not None:
            _check_choice("residual_scope", self.residual_scope, get_args(Scope))
        self._check_activation_scale()
        for site in self.residual_sites or ():
            _check_choice("residual_sites", site, get_args(Site))
        for fraction in (self.residual, *(self.residual_sites or {}).values()):
            if not 0.0 <= fraction <= 1.0:
                raise ValueError(f"residual={fraction} is not a fraction; give 0 (off) to 1 (every channel)")
            if fraction and self.precision.activation not in FP4_ACTIVATIONS:
                raise ValueError(
                    f"residual={fraction} repairs FP4 activations, but rollout={self.rollout!r} has "
                    f"{self.precision.activation or 'BF16'} activations; set residual=0 or rollout='nvfp4'"
                )
        if self.learner == "full" and self.compensates and self.residual_scope == "batch":
            raise ValueError(
                "residual_scope='batch' with learner='full' chooses other channels on each side, because "
                "the sides never see the same batch; use residual_scope='token' or learner='weights'"
            )
        if self.keep is not None and not isinstance(self.keep, tuple):
            object.__setattr__(self, "keep", tuple(self.keep))

    def _check_activation_scale(self) -> None:
        if self.activation_scale == "batch":
            raise ValueError(
                "activation_scale='batch': under one dynamic scale for a whole forward pass a batch-mate changes "
                "a row's codes, so log-probabilities depend on the batch; use 'token' or 'static'"
            )
        _check_choice("activation_scale", self.activation_scale, get_args(ScaleSource))
        dynamic = PRECISIONS[self.rollout].activation
        if self.activation_scale == "static" and dynamic not in STATIC:
            raise ValueError(
                f"activation_scale='static' needs activations with a scale a tensor, but rollout={self.rollout!r} has "
                f"{dynamic or 'BF16'} activations; set activation_scale='token', or use rollout='nvfp4' or 'fp8'"
            )

    @property
    def precision(self) -> Precision:
        """Formats of the rollout side."""
        dynamic = PRECISIONS[self.rollout]
        if self.activation_scale == "token" or dynamic.activation is None:
            return dynamic
        return Precision(dynamic.weight, STATIC[dynamic.activation])

    @property
    def learner_precision(self) -> Precision:
        """Formats of the learner's forward pass under `learner`."""
        if self.learner == "bf16":
            return Precision(None, None)
        if self.learner == "weights":
            return Precision(self.precision.weight, None)
        return self.precision

    @property
    def scope(self) -> Scope:
        """`residual_scope` with its default filled in."""
        return self.residual_scope or ("token" if self.learner == "full" else "batch")

    @property
    def compensates(self) -> bool:
        """Whether any site has a residual pass."""
        return bool(self.residual) or any((self.residual_sites or {}).values())

    def residual_at(self, site: str, moe: bool) -> float:
        """Fraction of channels repaired at a kind of site, in a mixture of experts or in a dense model."""
        default = self.residual if site == "w13" or not moe else 0.0
        return (self.residual_sites or {}).get(site, default)  # type: ignore[call-overload]

    @property
    def quantizes_activations(self) -> bool:
        """True where whole-model parity between kernels can only be statistical (codes flip)."""
        return self.precision.activation is not None


def _check_choice(field: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"{field}={value!r} is unknown; choose one of {', '.join(allowed)}")
