"""Faults by name: what a healthy pair of sides never shows, each looked for in its own way.

    plan        the two sides wear other plans
    versions    completions were sampled by other weights than the learner holds
    bytes       the engine serves other bytes than the learner publishes
    modules     a module of the engine, given the input it had in the engine, answers otherwise than the same
                module built anew from the learner's weights: no error upstream can excuse it
    words       the engine's log-probabilities fit another reading of the same tokens better than the right one:
                another temperature, shifted positions, an fp32 head, the neighbouring token, earlier weights

The last one needs nothing but token ids and log-probabilities, so it works on any engine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from lowbitrl.diagnose.lab import Drawn, Scores
from lowbitrl.diagnose.mismatch import differences, score
from lowbitrl.diagnose.statistics import paired_gain
from lowbitrl.quant import attachment, real_tokens
from lowbitrl.quant.stacks import is_expert_module
from lowbitrl.rollout.embedded import EmbeddedEngine
from lowbitrl.sync.manifest import entries_of
from lowbitrl.sync.publisher import publish
from lowbitrl.trainer.batch import arrange

STALE_SHARE = 0.5  # share of tensors with other bytes from which it is a version rather than a layer
FITS = 0.95  # a reading that leaves more than this part of the words' distance explains nothing
SHIFTS = (-1, 1)
WORDS_TOKENS = 400


@dataclass(frozen=True)
class Finding:
    """A fault: its kind, where it is, and the numbers that show it.

    Example:
        Finding("wrong bytes", "model.layers.1.mlp.up_proj.scale", "served checksum 1, published 2")
    """

    fault: str
    where: str
    evidence: str

    def __str__(self) -> str:
        return f"{self.fault}: {self.where} ({self.evidence})"


def inspect(
    learner: PreTrainedModel,
    reference: PreTrainedModel,
    engine: EmbeddedEngine,
    drawn: Drawn,
    *,
    learner_words: Scores | None = None,
    earlier: PreTrainedModel | None = None,
) -> list[Finding]:
    """Every fault found on an embedded engine and its learner; [] where they are what they should be.

    Args:
        learner: prepared with side="learner".
        reference: a fresh model of the learner's weights, prepared with side="rollout".
        engine: what sampled `drawn`.
        learner_words: the log-probabilities the trainer used for these tokens, to be read as the engine's are.
        earlier: the reference of an earlier version, to tell stale weights by their words.
    """
    plan = attachment(learner).plan
    if plan.digest != engine.plan.digest:
        where = plan.diff(engine.plan) or "residual scope"
        return [Finding("other plan", where.replace("\n", " / "), f"{plan.digest} and {engine.plan.digest}")]
    found = [
        *versions(engine.version, drawn),
        *served_bytes(learner, engine),
        *modules(reference, engine, drawn),
    ]
    found += words(reference, drawn, drawn.words, "engine", earlier)
    if learner_words is not None:
        found += words(learner, drawn, learner_words, "learner")
    return found


def versions(expected: int, drawn: Drawn) -> list[Finding]:
    """Completions of another weight version than the engine serves now."""
    odd = sorted({c.version for c in drawn.completions} - {expected})
    count = sum(c.version != expected for c in drawn.completions)
    evidence = f"{count} of {len(drawn.completions)} completions, versions {odd}, not {expected}"
    return [Finding("stale version", "completions", evidence)] if odd else []


def served_bytes(learner: PreTrainedModel, engine: EmbeddedEngine) -> list[Finding]:
    """Tensors that the engine serves otherwise than the learner would publish them now."""
    published = publish(learner, engine.version).tensors
    served = engine.served()
    missing = [n for n in published if n not in served]
    ours, theirs = entries_of(published), entries_of({n: t for n, t in served.items() if n in published})
    odd = [n for n in theirs if theirs[n] != ours[n]]
    if len(odd) > STALE_SHARE * len(published):
        return [
            Finding(
                "stale version", "all weights", f"{len(odd)} of {len(published)} tensors have other bytes"
            )
        ]
    return [
        Finding("unquantized", n.rpartition(".")[0], "the engine holds no bytes for it") for n in missing
    ] + [Finding("wrong bytes", n, f"served {theirs[n]}, published {ours[n]}") for n in odd]


def modules(reference: PreTrainedModel, engine: EmbeddedEngine, drawn: Drawn) -> list[Finding]:
    """Modules of the engine that answer otherwise than the reference's, given the same input: worst first."""
    theirs: dict[str, nn.Module] = dict(engine.model.named_modules())
    found: dict[str, nn.Module] = dict(reference.named_modules())
    ours = {name: m for name, m in found.items() if name in theirs and _computes(m)}
    responses = drawn.head(WORDS_TOKENS).completions
    prompts = [drawn.prompts[c.prompt_index] for c in responses]
    batch = arrange(prompts, [c.token_ids for c in responses], "padded", engine.model.device)
    gaps: dict[str, tuple[float, str]] = {}
    ours_real, theirs_real = (real_tokens(model, batch.real) for model in (reference, engine.model))
    with torch.no_grad(), ours_real, theirs_real, _replaying(ours, theirs, gaps):
        engine.model(
            input_ids=batch.ids,
            attention_mask=batch.attention_mask,
            position_ids=batch.positions,
            use_cache=False,
        )
    odd = sorted((name for name in gaps if gaps[name][0] > 0), key=lambda name: -gaps[name][0])
    return [Finding("other arithmetic", name, gaps[name][1]) for name in odd]


def _computes(module: nn.Module) -> bool:
    """Whether a module does arithmetic of its own rather than only calling others."""
    return not any(module.children()) or any(True for _ in module.parameters(recurse=False))


@contextmanager
def _replaying(
    ours: dict[str, nn.Module], theirs: dict[str, nn.Module], gaps: dict[str, tuple[float, str]]
) -> Iterator[None]:
    def hook(name: str) -> Callable[..., None]:
        def compare(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            gaps[name] = _gap(output, ours[name](*args, **kwargs))
            if is_expert_module(module):
                gaps[name] = max(gaps[name], _by_expert(module, ours[name], *args))

        return compare

    # Through the instance's own forward where there is one: a patched module is what is looked for.
    handles = [theirs[name].register_forward_hook(hook(name), with_kwargs=True) for name in ours]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _gap(theirs: Any, ours: Any) -> tuple[float, str]:
    """Relative distance of two outputs (the first tensors of tuples), and how to say it."""
    a, b = (t[0] if isinstance(t, tuple) else t for t in (theirs, ours))
    gap = float((a.float() - b.float()).norm() / b.float().norm().clamp(min=1e-30))
    if a.dtype != b.dtype:
        return max(gap, 1e-12), f"computes in {_short(a.dtype)}, the learner in {_short(b.dtype)}"
    return gap, f"differs by {gap:.2g} of its output's norm on the same input"


def _by_expert(theirs: Any, ours: Any, x: Tensor, chosen: Tensor, weights: Tensor) -> tuple[float, str]:
    """The gap when the tokens, (T, H), go to all experts in turn: sampling may leave the odd one out."""
    count, slots = theirs.num_experts, torch.arange(chosen.shape[1], device=chosen.device)
    turns = (torch.arange(len(chosen), device=chosen.device)[:, None] + slots) % count
    # Only the first choice weighs, so a token's output is that of one expert.
    first = torch.zeros_like(weights)
    first[:, 0] = 1
    answers = [module.forward(x, turns.to(chosen.dtype), first) for module in (theirs, ours)]
    gap, text = _gap(*answers)
    odd = turns[(answers[0] != answers[1]).any(-1), 0].unique().tolist()
    return gap, f"{text}, experts {odd} of {count}"


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def words(
    model: PreTrainedModel, drawn: Drawn, said: Scores, side: str, earlier: PreTrainedModel | None = None
) -> list[Finding]:
    """Readings of the tokens that explain `said` better than the right one does.

    Args:
        model: what should have said it. said: (T_i,) a response, in the order of `drawn.completions`.
    """
    some = drawn.head(WORDS_TOKENS)
    said = list(said[: len(some.completions)])
    right = _read(model, some, some.temperature)
    base = differences(right, said)
    found = []
    for (fault, where), reading in readings(model, some, right, earlier).items():
        pairs = [(b, r - s, s) for b, r, s in zip(base, reading(), said, strict=True) if len(s) > 1]
        if finding := _judge(fault, f"{side} {where}", pairs):
            found.append(finding)
    # Several readings may help a little; the one that explains most is the fault.
    return [finding for _, finding in sorted(found, key=lambda pair: pair[0])[:1]]


def _judge(
    fault: str, where: str, pairs: Sequence[tuple[Tensor, Tensor, Tensor]]
) -> tuple[float, Finding] | None:
    # A reading of neighbouring tokens says nothing about the first one: NaN there.
    before = [b[~r.isnan()] for b, r, _ in pairs]
    after = [r[~r.isnan()] for _, r, _ in pairs]
    if not before:
        return None
    was, left = (float(torch.cat(list(d)).abs().mean()) for d in (before, after))
    if left >= FITS * was or paired_gain(before, after).low <= 0:
        return None
    return left / was, Finding(fault, where, f"{left:.4f} nats off if so, {was:.4f} as it should be")


def readings(
    model: PreTrainedModel, drawn: Drawn, right: Scores, earlier: PreTrainedModel | None
) -> dict[tuple[str, str], Callable[[], Scores]]:
    """Wrong ways to read the tokens, by fault and place; each is scored when it is called."""
    own = getattr(model.generation_config, "temperature", None) or 1.0
    temperatures = sorted({1.0, own, drawn.temperature**2} - {drawn.temperature})
    table: dict[tuple[str, str], Callable[[], Scores]] = {
        ("temperature", f"reports temperature {t:g} instead of {drawn.temperature:g}"): (
            lambda t=t: _read(model, drawn, t)
        )
        for t in temperatures
    }
    table |= {
        ("positions", f"response positions are shifted by {shift:+d}"): (
            lambda s=shift: _read(model, drawn, drawn.temperature, shift=s)
        )
        for shift in SHIFTS
    }
    table[("neighbouring token", "log-probabilities belong to the token before")] = lambda: [
        torch.cat([r.new_full((1,), torch.nan), r[:-1]]) for r in right
    ]
    head = model.get_output_embeddings()
    if isinstance(head, nn.Linear) and head.weight.dtype != torch.float32:
        table[("fp32 head", "output head runs in fp32")] = lambda: _read(
            model, drawn, drawn.temperature, around=lambda: fp32_head(head)
        )
    if earlier is not None:
        table[("stale version", "log-probabilities are those of earlier weights")] = lambda: _read(
            earlier, drawn, drawn.temperature
        )
    return table


def _read(
    model: PreTrainedModel,
    drawn: Drawn,
    temperature: float,
    shift: int = 0,
    around: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> Scores:
    """Score response by response, the only way in which positions can be shifted for each alone."""
    scores = []
    for completion in drawn.completions:
        length = len(drawn.prompts[completion.prompt_index])
        with around(), shifted_positions(model, length, shift):
            scores += score(model, drawn.prompts, [completion], temperature=temperature)
    return scores


@contextmanager
def shifted_positions(model: PreTrainedModel, prompt_length: int, shift: int) -> Iterator[None]:
    """Inside the block, tokens after the first `prompt_length` sit `shift` positions further."""

    def hook(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        places = kwargs["position_ids"]
        moved = places + shift * (places >= prompt_length)
        # Without a mask transformers takes a jump of positions for the start of another sequence.
        return args, kwargs | {"position_ids": moved, "attention_mask": torch.ones_like(places)}

    handle = model.base_model.register_forward_pre_hook(hook, with_kwargs=True) if shift else None
    try:
        yield
    finally:
        if handle is not None:
            handle.remove()


@contextmanager
def fp32_head(head: nn.Linear) -> Iterator[None]:
    """Inside the block the output head multiplies in fp32."""

    def hook(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
        return F.linear(
            args[0].float(), head.weight.float(), None if head.bias is None else head.bias.float()
        )

    handle = head.register_forward_hook(hook)
    try:
        yield
    finally:
        handle.remove()
