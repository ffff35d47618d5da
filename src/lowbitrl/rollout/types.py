"""What crosses the border between an engine and whoever asks it for samples."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from torch import Tensor

FinishReason = Literal["stop", "length", "abort", "nonfinite"]
LOWEST_TEMPERATURE = 1e-5  # Far below it logits / temperature leaves fp32, and NaN looks like broken weights.


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How to sample. Log-probabilities are those of the distribution after temperature.

    Attributes:
        max_tokens: most tokens a completion may have, its stop token included.
        temperature: divides the logits, in fp32; at least `LOWEST_TEMPERATURE`, or 0, which takes the most
            likely token.
        top_p / top_k: must be off (1.0 / 0): truncating on one side only makes every importance
            ratio wrong.
        stop_token_ids: tokens that end a completion; empty means the model's own.

    Raises:
        ValueError: a value outside its range, or truncation asked for.
    """

    max_tokens: int = 128
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    stop_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens={self.max_tokens} samples nothing; give at least 1")
        if self.temperature != 0.0 and not LOWEST_TEMPERATURE <= self.temperature < float("inf"):
            raise ValueError(
                f"temperature={self.temperature} must be a finite number of at least {LOWEST_TEMPERATURE}, "
                "or 0 for the most likely token"
            )
        if self.top_p != 1.0 or self.top_k != 0:
            raise ValueError(
                f"top_p={self.top_p}, top_k={self.top_k}: truncated sampling renormalizes on the engine's side "
                "only, so learner and rollout would score different distributions; use top_p=1, top_k=0"
            )


@dataclass(frozen=True)
class Completion:
    """One sampled response.

    Attributes:
        prompt_index: which of the prompts given to `generate`.
        sample_index: which of its n samples.
        token_ids: sampled tokens, the stop token included when one was sampled.
        rollout_logprobs: log-probability of each token when it was sampled, fp32 values.
        finish_reason: "stop" (stop token), "length" (max_tokens reached: truncated), "abort" (given up by the
            engine), "nonfinite" (its next logits held NaN or Inf; tokens are those before).
        version: weight version that sampled it; its first token, where an update met it.
        token_versions: the version that sampled each token, where an engine lets updates meet requests.
        routes: experts taken by each token that was fed, (prompt + response - 1, layers, k) int16,
            where the engine records them (the last token is sampled, never fed).

    Example:
        Completion(0, 3, (24, 30, 2), (-0.51, -1.2, -0.003), "stop", 7)
    """

    prompt_index: int
    sample_index: int
    token_ids: tuple[int, ...]
    rollout_logprobs: tuple[float, ...]
    finish_reason: FinishReason
    version: int
    routes: Tensor | None = field(default=None, compare=False, repr=False)
    token_versions: tuple[int, ...] | None = field(default=None, repr=False)

    @property
    def versions(self) -> tuple[int, ...]:
        """The weight version that sampled each token."""
        return (self.version,) * len(self.token_ids) if self.token_versions is None else self.token_versions

    @property
    def truncated(self) -> bool:
        """Whether the response was cut off rather than ended."""
        return self.finish_reason == "length"
