"""Sampled tokens, and any arithmetic's opinion of them: the bench every measurement works on.

An arithmetic is a recipe worn on one side under one attention implementation. Learners are scored
under another implementation than rollouts, because the two engines of a real stack never share
their kernels: with equal kernels a symmetric recipe would look exact, which no deployment is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from transformers import PreTrainedModel

from lowbitrl.diagnose.mismatch import score
from lowbitrl.quant import Plan, Recipe, prepare, resolve
from lowbitrl.quant.apply import Side
from lowbitrl.quant.topology import expert_stacks
from lowbitrl.rollout import Completion
from lowbitrl.trainer.calibration import calibrate_on

Load = Callable[[str, torch.dtype | None], PreTrainedModel]
Scores = list[Tensor]
# On a CPU (True) activations of more tokens fall out of its cache.
MICRO_BATCH_TOKENS = {True: 1024, False: 16384}
CALIBRATION_PROMPTS = 32


@dataclass(frozen=True)
class Drawn:
    """Prompts, what an engine sampled for them, and at which temperature.

    Example:
        Drawn([[1, 5, 9]], [Completion(0, 0, (24, 2), (-0.5, -1.2), "stop", 0)], 1.0)
    """

    prompts: Sequence[Sequence[int]]
    completions: Sequence[Completion]
    temperature: float = 1.0

    @property
    def words(self) -> Scores:
        """The engine's own log-probabilities, (T_i,) fp32 a response."""
        return [torch.tensor(c.rollout_logprobs) for c in self.completions]

    @property
    def routed(self) -> bool:
        """Whether every completion carries the experts its tokens took."""
        return all(c.routes is not None for c in self.completions)

    @property
    def tokens(self) -> int:
        """Sampled tokens."""
        return sum(len(c.token_ids) for c in self.completions)

    def head(self, tokens: int) -> Drawn:
        """The first responses, as many as hold at least `tokens` sampled tokens (or all)."""
        return self.cut(tokens)[0]

    def cut(self, tokens: int) -> tuple[Drawn, Drawn]:
        """`head(tokens)` and the responses after it."""
        count = 0
        for i, completion in enumerate(self.completions):
            if count >= tokens:
                return replace(self, completions=self.completions[:i]), replace(
                    self, completions=self.completions[i:]
                )
            count += len(completion.token_ids)
        return self, replace(self, completions=[])


class Lab:
    """Fresh models on demand; scores are kept, so an arithmetic that two tables need runs once.

    Args:
        load: `load(attention, dtype)` gives an unprepared model in eval mode, with equal weights every
            time; dtype None is the compute dtype of the run.
        drawn: the tokens to score; responses without tokens are refused.
        learner_attention / rollout_attention: names transformers knows ("eager", "sdpa", ...).

    Raises:
        ValueError: nothing was sampled, or an empty response.
    """

    def __init__(
        self, load: Load, drawn: Drawn, learner_attention: str = "eager", rollout_attention: str = "sdpa"
    ) -> None:
        if not drawn.completions or not all(c.token_ids for c in drawn.completions):
            raise ValueError("diagnosis needs sampled tokens; raise max_tokens or drop empty responses")
        self.load = load
        self.drawn = drawn
        self.attention: dict[Side, str] = {"learner": learner_attention, "rollout": rollout_attention}
        self._scores: dict[tuple[str, Side, str, bool], Scores] = {}
        self._shape: PreTrainedModel | None = None

    def model(
        self, recipe: Recipe, side: Side, attention: str | None = None, dtype: torch.dtype | None = None
    ) -> PreTrainedModel:
        """A fresh model that wears `recipe` on `side`, without gradients."""
        model = self.load(attention or self.attention[side], dtype)
        prepare(model, recipe, side)
        find_scales(model, self.drawn.prompts)
        model.requires_grad_(False)
        return model

    @property
    def shape(self) -> PreTrainedModel:
        """The unprepared model without its weights: enough to plan."""
        if self._shape is None:
            self._shape = self.load(self.attention["rollout"], None).to("meta")  # type: ignore[arg-type]
        return self._shape

    def plan(self, recipe: Recipe) -> Plan:
        """`recipe` resolved on the model."""
        return resolve(recipe, self.shape)

    @property
    def experts_per_token(self) -> int:
        """Experts that a token takes; 1 in a dense model."""
        return getattr(self.shape.config, "num_experts_per_tok", None) or 1

    @property
    def moe(self) -> bool:
        """Whether the model has stacks of experts."""
        return bool(expert_stacks(self.shape))

    def scores(
        self, recipe: Recipe, side: Side, attention: str | None = None, replay: bool = False
    ) -> Scores:
        """Log-probabilities of the sampled tokens, (T_i,) fp32 a response; with the engine's routes if `replay`."""
        recipe, attention = worn(recipe, side), attention or self.attention[side]
        key = (repr(recipe), side, attention, replay)
        if key not in self._scores:
            self._scores[key] = self.score(self.model(recipe, side, attention), replay=replay)
        return self._scores[key]

    def score(self, model: PreTrainedModel, drawn: Drawn | None = None, replay: bool = False) -> Scores:
        """`score` of `model` on the sampled tokens, or on some of them."""
        drawn = drawn or self.drawn
        longest = max(len(drawn.prompts[c.prompt_index]) + len(c.token_ids) for c in drawn.completions)
        return score(
            model,
            drawn.prompts,
            drawn.completions,
            temperature=drawn.temperature,
            micro_batch_tokens=max(longest, MICRO_BATCH_TOKENS[model.device.type == "cpu"]),
            replay=replay,
        )


def find_scales(model: PreTrainedModel, prompts: Sequence[Sequence[int]]) -> None:
    """Static activation scales, if the model's plan has any, from the first prompts, as at the start of a run."""
    some = prompts[:CALIBRATION_PROMPTS]
    calibrate_on(model, some, max([MICRO_BATCH_TOKENS[model.device.type == "cpu"], *map(len, some)]))


def worn(recipe: Recipe, side: Side) -> Recipe:
    """One recipe for all that mean the same arithmetic on `side`, so that it is measured once."""
    if recipe.rollout == "bf16" or (side == "learner" and recipe.learner == "bf16"):
        return Recipe()
    if side == "learner" and recipe.learner == "weights":
        return plain(recipe)
    # A residual of nothing or of everything has no choice of channels to scope.
    fractions = {recipe.residual, *(recipe.residual_sites or {}).values()}
    scope = None if fractions <= {0.0, 1.0} else recipe.scope
    learner = recipe.learner if side == "learner" else "weights"
    return replace(recipe, learner=learner, residual_scope=scope)


def plain(recipe: Recipe) -> Recipe:
    """The recipe without its residual."""
    return replace(recipe, residual=0.0, residual_sites=None, residual_scope=None)
