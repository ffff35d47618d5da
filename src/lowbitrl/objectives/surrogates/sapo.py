"""SAPO: a soft gate in place of the clip (Gao et al. 2025, arXiv 2511.20347)."""

import torch
from torch import Tensor

from lowbitrl.objectives.ratios import bounded_exp
from lowbitrl.objectives.surrogates.band import Surrogate, by_sign


def sapo(
    logprobs_BT: Tensor,
    old_logprobs_BT: Tensor,
    advantages_B1: Tensor,
    mask_BT: Tensor,
    *,
    tau_positive: float = 1.0,
    tau_negative: float = 1.05,
) -> Surrogate:
    """Maximize f(r_t) A with f(r) = (4 / tau) sigmoid(tau (r - 1)); tau by the sign of A.

    f'(1) = 1, so on policy this is the plain gradient. It fades on both sides without ever being cut, until
    the sigmoid rounds to 1 in float32 at a ratio near 18.
    The paper's temperatures; the larger tau makes tokens of negative responses fade sooner.
    Raises ValueError unless both are positive.
    """
    if min(tau_positive, tau_negative) <= 0:
        raise ValueError(f"tau_positive={tau_positive}, tau_negative={tau_negative}: both must be above 0")
    ratio_BT = bounded_exp(logprobs_BT - old_logprobs_BT)
    tau_B1 = by_sign(advantages_B1, tau_positive, tau_negative)
    return Surrogate(-torch.sigmoid(tau_B1 * (ratio_BT - 1)) * (4 / tau_B1) * advantages_B1)
