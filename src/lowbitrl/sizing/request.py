"""What a person asks to be sized: a run's settings, and what they leave open."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from lowbitrl.config import ConfigError, RunConfig

MOST_RANKS = 65536


class SizeRequest(BaseModel):
    """A run on `ranks` processes, one a GPU.

    Attributes:
        ranks: processes of torchrun; 1: none.
        prompt_tokens: length of a prompt; a response's is rollout.max_tokens.
        config: the settings of the run, its recipe included.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    ranks: int = Field(default=1, ge=1, le=MOST_RANKS)
    prompt_tokens: int = Field(default=512, ge=1)
    config: RunConfig

    @classmethod
    def of(cls, **values: Any) -> SizeRequest:
        """The request, its errors as `ConfigError`."""
        try:
            return cls(**values)
        except ValidationError as error:
            raise ConfigError(
                "; ".join(
                    f"{'.'.join(map(str, e['loc']))}={e['input']!r}: {e['msg'].lower()}"
                    for e in error.errors()
                )
            ) from error

    @property
    def sequences(self) -> int:
        """Responses that the engine of one rank holds at once, if they fit."""
        rollout = self.config.rollout
        share = -(-rollout.prompts * rollout.samples // self.ranks)
        return min(rollout.max_batch, share) if rollout.engine == "embedded" else share

    @property
    def tokens(self) -> int:
        """Length of a whole sequence."""
        return self.prompt_tokens + self.config.rollout.max_tokens
