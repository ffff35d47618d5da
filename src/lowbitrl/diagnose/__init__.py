"""How far sampler and learner are apart, and pictures of it."""

from lowbitrl.diagnose.mismatch import Mismatch, compare, measure

__all__ = ["Mismatch", "compare", "measure"]
