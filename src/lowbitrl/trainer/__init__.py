"""The learner: log-probabilities, updates, optimizers, checkpoints."""

from lowbitrl.trainer.batch import TrainingBatch
from lowbitrl.trainer.config import ObjectiveConfig, TrainerConfig
from lowbitrl.trainer.optim import OptimizerConfig
from lowbitrl.trainer.trainer import NonFiniteError, Trainer

__all__ = [
    "NonFiniteError",
    "ObjectiveConfig",
    "OptimizerConfig",
    "Trainer",
    "TrainerConfig",
    "TrainingBatch",
]
