"""TRL's GRPOTrainer with low-bit rollouts; nothing but this package imports TRL."""

from lowbitrl.integrations.trl.trainer import LowBitGRPOTrainer

__all__ = ["LowBitGRPOTrainer"]
