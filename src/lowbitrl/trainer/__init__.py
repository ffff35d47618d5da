"""The learner: log-probabilities, updates, optimizers, checkpoints."""

from lowbitrl.trainer.batch import TrainingBatch
from lowbitrl.trainer.optim import OptimizerConfig
from lowbitrl.trainer.trainer import Trainer, TrainerConfig

__all__ = ["OptimizerConfig", "Trainer", "TrainerConfig", "TrainingBatch"]
