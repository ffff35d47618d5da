"""Tasks: prompts with verifiable rewards. `make_task(TaskConfig(...))` makes one."""

from lowbitrl.tasks.config import RewardsConfig, TaskConfig
from lowbitrl.tasks.rewards import Failure, RewardError
from lowbitrl.tasks.task import Prompt, Scored, Split, Task, check_lengths, completion_text, encode_prompt

__all__ = [
    "Failure",
    "Prompt",
    "RewardError",
    "RewardsConfig",
    "Scored",
    "Split",
    "Task",
    "TaskConfig",
    "check_lengths",
    "completion_text",
    "encode_prompt",
    "make_task",
]


def make_task(config: TaskConfig, rewards: RewardsConfig | None = None) -> Task:
    """The task a recipe's `[task]` section describes, checked as far as it can be without a tokenizer.

    Args:
        rewards: how its rewards are contained; the defaults if left out.

    Raises ValueError, ImportError or FileNotFoundError naming the field, the rule and the remedy.
    """
    # Imported when asked for: a run on a file of prompts need not load reasoning-gym.
    if config.name is not None:
        from lowbitrl.tasks.reasoning_gym import ReasoningGymTask

        return ReasoningGymTask(config, rewards)
    from lowbitrl.tasks.file import FileTask

    return FileTask(config, rewards)
