"""Engines that sample: one protocol, and the ones that speak it."""

from lowbitrl.rollout.types import Completion, Sampling

__all__ = ["Completion", "Sampling"]
