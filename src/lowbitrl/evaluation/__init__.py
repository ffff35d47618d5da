"""Evaluation: pass@k, average of n and their standard errors over a task's prompts."""

from lowbitrl.evaluation.evaluate import Evaluation, evaluate, mean_and_error, pass_at_k

__all__ = ["Evaluation", "evaluate", "mean_and_error", "pass_at_k"]
