"""Tasks: prompts with verifiable rewards. `make_task(TaskConfig(...))` makes one."""

from lowbitrl.tasks.config import TaskConfig
from lowbitrl.tasks.task import Prompt, Split, Task, check_lengths, completion_text, encode_prompt

__all__ = [
    "Prompt",
    "Split",
    "Task",
    "TaskConfig",
    "check_lengths",
    "completion_text",
    "encode_prompt",
    "make_task",
]


def make_task(config: TaskConfig) -> Task:
    """The task a recipe's `[task]` section describes, checked as far as it can be without a tokenizer.

    Raises ValueError, ImportError or FileNotFoundError naming the field, the rule and the remedy.
    """
    # Imported when asked for: a run on a file of prompts need not load reasoning-gym.
    if config.name is not None:
        from lowbitrl.tasks.reasoning_gym import ReasoningGymTask

        return ReasoningGymTask(config)
    from lowbitrl.tasks.file import FileTask

    return FileTask(config)
