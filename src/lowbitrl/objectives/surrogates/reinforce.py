"""REINFORCE: the plain policy gradient (Williams 1992)."""

from torch import Tensor

from lowbitrl.objectives.surrogates.band import Surrogate


def reinforce(
    logprobs_BT: Tensor, old_logprobs_BT: Tensor, advantages_B1: Tensor, mask_BT: Tensor
) -> Surrogate:
    """Maximize A log pi_t. No ratio and no bound: right only on policy, or under a correction's weights.

    `old_logprobs_BT` is not read here; corrections read it.
    """
    return Surrogate(-advantages_B1 * logprobs_BT)
