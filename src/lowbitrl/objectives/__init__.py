"""Objectives as algebra: pure functions of log-probabilities, advantages and masks. Imports torch alone.

`policy_loss(name, ...)` puts the parts together: a surrogate (`surrogates/`), weights and a keep-mask for the
mismatch (`corrections`), penalties, and an average (`aggregate`, the only file that divides a loss).
"""

from lowbitrl.objectives.advantages import GroupAdvantages, group_advantages
from lowbitrl.objectives.aggregate import AGGREGATES, aggregate_loss, denominator_of
from lowbitrl.objectives.corrections import CORRECTIONS, Correction, correct
from lowbitrl.objectives.loss import PolicyLoss, batch_denominator, policy_loss
from lowbitrl.objectives.metrics import error_token_metrics, mismatch_metrics, repetition, weight_metrics
from lowbitrl.objectives.penalties import (
    entropy_of,
    kl_estimate,
    overlong_filter,
    penalize_kl,
    soft_overlong_penalty,
)
from lowbitrl.objectives.registry import Objective, get_objective, objective_names, register_objective
from lowbitrl.objectives.surrogates.band import Surrogate

__all__ = [
    "AGGREGATES",
    "CORRECTIONS",
    "Correction",
    "GroupAdvantages",
    "Objective",
    "PolicyLoss",
    "Surrogate",
    "aggregate_loss",
    "batch_denominator",
    "correct",
    "denominator_of",
    "entropy_of",
    "error_token_metrics",
    "get_objective",
    "group_advantages",
    "kl_estimate",
    "mismatch_metrics",
    "objective_names",
    "overlong_filter",
    "penalize_kl",
    "policy_loss",
    "register_objective",
    "repetition",
    "soft_overlong_penalty",
    "weight_metrics",
]
