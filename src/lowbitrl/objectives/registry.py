"""The objectives by name: a surrogate, the average its paper takes, and its own mismatch weight if any."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from lowbitrl.objectives.aggregate import AGGREGATES
from lowbitrl.objectives.corrections import Correction
from lowbitrl.objectives.names import EMPTY, check_parameters, find, keyword_defaults
from lowbitrl.objectives.surrogates.band import Surrogate
from lowbitrl.objectives.surrogates.cispo import cispo
from lowbitrl.objectives.surrogates.dapo import dapo
from lowbitrl.objectives.surrogates.dr_grpo import dr_grpo
from lowbitrl.objectives.surrogates.grpo import grpo
from lowbitrl.objectives.surrogates.gspo import gspo
from lowbitrl.objectives.surrogates.positive_only import positive_only
from lowbitrl.objectives.surrogates.reinforce import reinforce
from lowbitrl.objectives.surrogates.sapo import sapo
from lowbitrl.objectives.surrogates.tbpo import tbpo, tbpo_mismatch

SurrogateFunction = Callable[..., Surrogate | Tensor]


@dataclass(frozen=True)
class Objective:
    """What a name stands for.

    Example: Objective("tbpo", tbpo, "seq-mean-token-mean", tbpo_mismatch).parameters ->
    {"eps_high": 0.1, "delta_low": 0.1, "delta_high": 0.1, "tis_cap": 2.0}
    """

    name: str
    surrogate: SurrogateFunction
    """(logprobs_BT, old_logprobs_BT, advantages_B1, mask_BT, *, parameters) -> Surrogate, or its loss."""
    aggregate: str
    """How its paper averages; a name of `aggregate.AGGREGATES`."""
    mismatch: Callable[..., Correction | None] | None = None
    """(old_logprobs_BT, rollout_logprobs_BT or None, mask_BT, *, parameters) -> the paper's own weight."""

    @property
    def parameters(self) -> dict[str, Any]:
        """Every parameter with its default, the surrogate's before the mismatch weight's."""
        return keyword_defaults(self.surrogate) | (keyword_defaults(self.mismatch) if self.mismatch else {})

    def split(self, parameters: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Given parameters, defaults filled in, for the surrogate and for the mismatch weight.

        Raises ValueError naming the nearest known parameter and all of them.
        """
        check_parameters(f"objective {self.name!r}", parameters, self.parameters)
        filled = self.parameters | dict(parameters)
        own = keyword_defaults(self.surrogate)
        rest = {key: value for key, value in filled.items() if key not in own}
        return {key: filled[key] for key in own}, rest


_OBJECTIVES = {
    o.name: o
    for o in (
        Objective("grpo", grpo, "seq-mean-token-mean"),
        Objective("dr_grpo", dr_grpo, "seq-mean-token-sum"),
        Objective("dapo", dapo, "token-mean"),
        Objective("gspo", gspo, "seq-mean-token-mean"),
        Objective("tbpo", tbpo, "seq-mean-token-mean", tbpo_mismatch),
        Objective("sapo", sapo, "seq-mean-token-mean"),
        Objective("cispo", cispo, "token-mean"),
        Objective("positive_only", positive_only, "seq-mean-token-mean"),
        Objective("reinforce", reinforce, "token-mean"),
    )
}


def get_objective(name: str) -> Objective:
    """The objective `name`; ValueError naming the nearest known one and all of them."""
    return find("objective", name, _OBJECTIVES)


def objective_names() -> tuple[str, ...]:
    """Every name that `policy_loss` takes, registered ones included."""
    return tuple(_OBJECTIVES)


def register_objective(name: str, *, aggregate: str) -> Callable[[SurrogateFunction], SurrogateFunction]:
    """Decorator: make a pure function an objective that `policy_loss(name, ...)` runs.

    The function takes (logprobs_BT, old_logprobs_BT, advantages_B1, mask_BT), all 0 outside the mask, and its
    parameters keyword-only with defaults; it returns the loss per token, (B, T) or (B, 1), or a `Surrogate`.
    Weights, masks, aggregation, parameter checks and metrics come from `policy_loss`.

        @register_objective("squared", aggregate="token-mean")
        def squared(logprobs_BT, old_logprobs_BT, advantages_B1, mask_BT, *, scale: float = 1.0):
            ratio_BT = (logprobs_BT - old_logprobs_BT).exp()
            return -ratio_BT * advantages_B1 + scale * (ratio_BT - 1) ** 2

    Raises ValueError for a name that is taken, an unknown aggregate, or a parameter without a default.
    """
    if name in _OBJECTIVES:
        raise ValueError(f"objective {name!r} is already registered")
    if aggregate not in AGGREGATES:
        raise ValueError(f"aggregate={aggregate!r} is not one of {', '.join(AGGREGATES)}")

    def register(surrogate: SurrogateFunction) -> SurrogateFunction:
        missing = [key for key, default in keyword_defaults(surrogate).items() if default is EMPTY]
        if missing:
            raise ValueError(f"objective {name!r}: give {', '.join(missing)} a default")
        _OBJECTIVES[name] = Objective(name, surrogate, aggregate)
        return surrogate

    return register
