"""The `[task]` section of a recipe."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from lowbitrl.tasks.limits import Limits

ScorerName = Literal["last-number", "first-number", "reasoning-gym"]


class TaskConfig(BaseModel):
    """Where prompts come from and what is rewarded.

    Example::

        TaskConfig(name="chain_sum", options={"max_terms": 2, "max_digits": 2}, prefill=True,
                   scorer="first-number")
        TaskConfig(path="prompts.jsonl", reward="my_rewards:exact")
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str | None = None
    """A reasoning-gym dataset. Exactly one of name and path."""
    path: str | None = None
    """A .jsonl or .parquet file, or the name of a dataset on the Hugging Face hub."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Of the reasoning-gym dataset (`max_terms = 2`), or of `datasets.load_dataset` (`split = "train"`)."""
    reward: str | None = None
    """`package.module:function`, called f(completion: str, prompt: dict) -> float. Not with scorer."""
    scorer: ScorerName | None = None
    """Of the answer in the prompt. Unset: reasoning-gym's own for a reasoning-gym task."""
    prefill: bool | str = False
    """Begin the reply: true for `What is 7 + 5?` / `7 + 5 =` (sums, products, basic_arithmetic; or a file's
    column `prefill`), or a template over the prompt's fields, as in `"{expression} ="`."""
    system: str | None = None
    """System message put before each prompt; unset leaves it to the chat template."""
    chat: bool = True
    """Apply the chat template. False sends the question as plain text, for base models."""
    max_prompt_tokens: int = Field(default=512, gt=0)
    """Tokens of one encoded prompt, prefill included; a longer one is an error."""
    held_out: int = Field(default=64, ge=0)
    """Prompts kept from training, the same for every seed."""
    seed: int = 0
    """Order (files) or draw (reasoning-gym) of the train prompts."""

    @field_validator("prefill", mode="before")
    @classmethod
    def _words_are_bools(cls, value: object) -> object:
        # From a command line everything is text, and `true` is no template.
        return {"true": True, "false": False}.get(value, value) if isinstance(value, str) else value

    @model_validator(mode="after")
    def _check(self) -> TaskConfig:
        if (self.name is None) == (self.path is None):
            raise ValueError(f"name = {self.name!r}, path = {self.path!r}: give exactly one")
        if self.reward and self.scorer:
            raise ValueError(f"reward = {self.reward!r} and scorer = {self.scorer!r}: keep one of them")
        if self.path and not self.reward and not self.scorer:
            raise ValueError(
                f"task {self.path!r} has no reward: set reward = 'package.module:function', or "
                "scorer = 'last-number' if the answers are numbers"
            )
        if self.path and self.scorer == "reasoning-gym":
            raise ValueError(f"scorer = 'reasoning-gym' needs a reasoning-gym name, not path = {self.path!r}")
        if self.system is not None and not self.chat:
            raise ValueError("system needs the chat template: drop system or set chat = true")
        return self


class RewardsConfig(BaseModel):
    """What happens to a completion whose reward fails, and what a reward may use; see docs/faults.md."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    contain: Literal["auto", "all", "none"] = "auto"
    """Rewards called in processes of their own, within the limits below. "auto": yours (`task.reward`), and those
    of reasoning-gym that do more than compare; "all": every one of reasoning-gym's too; "none": all here, where a
    reward that hangs or dies takes the run with it (but can use the GPU)."""
    on_failure: Literal["zero", "drop", "raise"] = "zero"
    """A completion whose reward fails counts as "zero", is left out of its group ("drop"), or stops the run
    ("raise"). In evaluations it counts as zero. A step whose every reward fails stops the run always."""
    timeout: float = Field(default=10.0, gt=0)
    """Seconds of wall time a completion."""
    cpu_seconds: int = Field(default=10, ge=1)
    """Seconds of CPU time a completion, all threads together."""
    memory_mb: int = Field(default=2048, ge=0)
    """MiB of address space over what importing the reward took; 0 sets no limit. Linux only."""
    file_mb: int = Field(default=16, ge=0)
    """MiB of a file that a reward writes, and of all that one completion leaves in the scratch folder in which
    rewards run, which is emptied after each."""
    files: int = Field(default=64, ge=0)
    """Files open at a time, and files left in the scratch folder."""
    workers: int = Field(default=0, ge=0, le=256)
    """Processes; 0 is one a core, at most 8."""

    def limits(self) -> Limits:
        """The limits of one completion."""
        names = ("timeout", "cpu_seconds", "memory_mb", "file_mb", "files")
        return Limits(**{name: getattr(self, name) for name in names})
