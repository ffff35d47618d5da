"""TBPO, Trust-Band Policy Optimization (QaRL section 3.2)."""

from torch import Tensor

from lowbitrl.objectives.corrections import Correction, tis
from lowbitrl.objectives.ratios import at_level, bounded_exp
from lowbitrl.objectives.surrogates.band import Surrogate, band


def tbpo(
    logprobs_BT: Tensor,
    old_logprobs_BT: Tensor,
    advantages_B1: Tensor,
    mask_BT: Tensor,
    *,
    eps_high: float = 0.1,
    delta_low: float = 0.1,
    delta_high: float = 0.1,
) -> Surrogate:
    """r = exp(mean_t(logprobs - old_logprobs)); maximize w~ r~ A, one term a response.

        A >= 0:  r~ = clip(r, 0, 1 + eps_high)
        A <  0:  r~ = clip(r, 1 - delta_low, 1 + delta_high)

    The weight w~ comes from `tbpo_mismatch`. Outside its band a response has no gradient at all. The band on
    A < 0 is two-sided: a cluster of garbled tokens whose probability rose cannot dominate the update.

    The defaults are ours: the paper's table of values is not in its text. 0.1 on a geometric mean catches a
    response in which every tenth token moved by a factor e, and lets the code flips of a quantized learner
    pass (independent shifts of 0.5 nats average to 0.04 over 150 tokens).
    Raises ValueError unless eps_high, delta_high >= 0 and 0 <= delta_low <= 1.
    """
    if not 0 <= delta_low <= 1 or min(eps_high, delta_high) < 0:
        raise ValueError(
            f"eps_high={eps_high}, delta_low={delta_low}, delta_high={delta_high} make no band: "
            "none may be negative, and delta_low is at most 1"
        )
    ratio_B1 = bounded_exp(at_level(logprobs_BT - old_logprobs_BT, mask_BT, "geometric"))
    return band(ratio_B1, advantages_B1, (0.0, 1 + eps_high), (1 - delta_low, 1 + delta_high))


def tbpo_mismatch(
    old_logprobs_BT: Tensor,
    rollout_logprobs_BT: Tensor | None,
    mask_BT: Tensor,
    *,
    tis_cap: float | None = 2.0,
) -> Correction | None:
    """w~ = min(exp(mean_t(old_logprobs - rollout_logprobs)), tis_cap), no gradient; None for tis_cap=None.

    The paper asks for a cap above 1 without naming it; 2.0 is the usual cap of truncated importance sampling.
    Raises ValueError for a cap of 1 or less, or without `rollout_logprobs_BT`.
    """
    if tis_cap is None:
        return None
    if tis_cap <= 1:
        raise ValueError(f"tis_cap={tis_cap} is not above 1; None turns the mismatch weight off")
    if rollout_logprobs_BT is None:
        raise ValueError("'tbpo' weighs by old_logprobs - rollout_logprobs; pass the latter, or tis_cap=None")
    return tis(old_logprobs_BT, rollout_logprobs_BT, mask_BT, level="geometric", cap=tis_cap)
