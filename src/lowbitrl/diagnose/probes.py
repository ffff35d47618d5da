"""Where in the model an error is made: per module, per token and channel.

    relative error = ||a - b||_2 / ||b||_2 over real tokens, of a module's input and of its output
    L2             = mean over tokens of ||a_t - b_t||_2, the same two

`layer_errors` lets errors accumulate through the network as they do in a run; `channel_profiles`
looks at one quantizer at a time: D = Q(X) - X, s_j = ||D[:, j]||_2 (QUADS eq. 20 and 23).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from lowbitrl.diagnose.amplification import decoder_layers
from lowbitrl.diagnose.lab import Drawn, Lab
from lowbitrl.quant import Recipe, attachment, real_tokens
from lowbitrl.quant.residual import channel_count, channel_scores
from lowbitrl.trainer.batch import arrange

ENERGY_AT = (0.125, 0.25, 0.5, 0.75)
HEAT_TOKENS, HEAT_CHANNELS = 64, 96
PROFILE_POINTS = 64


@dataclass(frozen=True)
class Trace:
    """Real tokens' input and output of one module in one forward pass, (n, K) and (n, N) fp32."""

    input: Tensor
    output: Tensor


def traces(model: PreTrainedModel, drawn: Drawn, modules: Sequence[str]) -> dict[str, Trace]:
    """One forward pass over the sampled sequences, watched at the named modules."""
    responses = [c.token_ids for c in drawn.completions]
    batch = arrange(
        [drawn.prompts[c.prompt_index] for c in drawn.completions], responses, "padded", model.device
    )
    found: dict[str, Trace] = {}
    with (
        torch.no_grad(),
        real_tokens(model, batch.real),
        _watching(model, modules, batch.real, found),
    ):
        model.base_model(
            input_ids=batch.ids,
            attention_mask=batch.attention_mask,
            position_ids=batch.positions,
            use_cache=False,
        )
    return found


@contextmanager
def _watching(
    model: nn.Module, names: Sequence[str], real: Tensor, found: dict[str, Trace]
) -> Iterator[None]:
    def hook(name: str) -> Callable[..., None]:
        def record(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            given = args[0] if args else kwargs["hidden_states"]
            made = output[0] if isinstance(output, tuple) else output
            found[name] = Trace(_rows(given, real), _rows(made, real))

        return record

    modules = dict(model.named_modules())
    handles = [modules[name].register_forward_hook(hook(name), with_kwargs=True) for name in names]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _rows(x: Tensor, real: Tensor) -> Tensor:
    """(b, L, K) or (b * L, K) to the real tokens' rows, (n, K) fp32."""
    return x.reshape(-1, x.shape[-1])[real.flatten()].float()


def blocks(model: PreTrainedModel) -> list[str]:
    """Names of what each decoder layer is made of: its children with matrices (attention, MLP or MoE)."""
    stack = decoder_layers(model)
    prefix = next(name for name, module in model.named_modules() if module is stack)
    return [
        f"{prefix}.{i}.{name}"
        for i, layer in enumerate(stack)
        for name, child in layer.named_children()
        if any(p.ndim > 1 for p in child.parameters())
    ]


def layer_errors(lab: Lab, recipe: Recipe, alignments: Sequence[Recipe], tokens: int) -> list[dict[str, Any]]:
    """Per block: norms, both sides' error against BF16, and their distance from each other under each alignment.

    Args:
        recipe: whose rollout is looked at. alignments: recipes whose learner is compared with it.
        tokens: about how many sampled tokens are passed through.
    """
    drawn = lab.drawn.head(tokens)
    exact_model = lab.model(Recipe(), "rollout")
    names = blocks(exact_model)
    exact = traces(exact_model, drawn, names)
    rollout = traces(lab.model(recipe, "rollout"), drawn, names)
    learners = {a.learner: traces(lab.model(a, "learner"), drawn, names) for a in alignments}
    rows = []
    for name in names:
        row: dict[str, Any] = {"block": name}
        row |= {"input_norm": _rms(exact[name].input), "output_norm": _rms(exact[name].output)}
        row |= _pair("rollout against bf16", rollout[name], exact[name])
        for alignment, found in learners.items():
            row |= _pair(f"{alignment} learner against bf16", found[name], exact[name])
            row |= _pair(f"{alignment} learner against rollout", found[name], rollout[name])
        rows.append(row)
    return rows


def _pair(what: str, ours: Trace, theirs: Trace) -> dict[str, float]:
    return {
        f"{what}, input": relative(ours.input, theirs.input),
        f"{what}, output": relative(ours.output, theirs.output),
        f"{what}, input L2": token_distance(ours.input, theirs.input),
        f"{what}, output L2": token_distance(ours.output, theirs.output),
    }


def relative(ours: Tensor, theirs: Tensor) -> float:
    """||ours - theirs|| / ||theirs||, 0 for two zero tensors."""
    return float((ours - theirs).norm() / theirs.norm().clamp(min=1e-30))


def token_distance(ours: Tensor, theirs: Tensor) -> float:
    """Mean over tokens of ||ours_t - theirs_t|| (QUADS figures 4b and 7)."""
    return float((ours - theirs).norm(dim=-1).mean())


def _rms(x: Tensor) -> float:
    return float(x.square().mean().sqrt())


def channel_profiles(lab: Lab, recipe: Recipe, tokens: int) -> dict[str, Any]:
    """What the activation quantizers of `recipe` do, site by site; {} where activations stay in BF16.

    Returns:
        "sites": relative error and the energy share that the worst k% of channels hold, a row a site.
        "worst": the site with the largest share of error held by half of its channels: sorted channel
        scores ("scores", at most 64 points), energy captured against k ("energy") and a heat map of |D|
        ("heat": at most 64 tokens x 96 channel bins, each the largest of its bin).
    """
    if recipe.precision.activation is None:
        return {}
    model = lab.model(recipe, "rollout")
    sites = {name: site for name, site in attachment(model).sites.items() if _watched(model, name)}
    found = traces(model, lab.drawn.head(tokens), [str(_watched(model, name)) for name in sites])
    inputs = {name: found[str(_watched(model, name))].input for name in sites}
    errors = {name: _error(x, sites[name].format.fake_quantize) for name, x in inputs.items()}
    rows = [_site_row(name, inputs[name], error) for name, error in errors.items()]
    worst = max(rows, key=lambda row: row["error"])["site"]
    return {"sites": rows, "worst": {"site": worst} | _profile(errors[worst])}


def _watched(model: nn.Module, site: str) -> str | None:
    """The module whose input a site quantizes; None inside an experts module, where no input is a module's."""
    modules = dict(model.named_modules())
    if site in modules:
        return site
    owner, _, leaf = site.rpartition(".")
    return None if leaf.startswith("down") else owner


def _error(x: Tensor, quantize: Callable[..., Tensor]) -> Tensor:
    return quantize(x, check=False) - x


def _site_row(name: str, x: Tensor, error: Tensor) -> dict[str, Any]:
    return {
        "site": name,
        "channels": x.shape[-1],
        "error": float(error.norm() / x.norm().clamp(min=1e-30)),
    } | {f"energy at {share:.1%}": energy(error, share) for share in ENERGY_AT}


def energy(error: Tensor, share: float) -> float:
    """Part of ||D||^2 that the `share` of channels with the largest scores hold."""
    squares = channel_scores(error, None).square().sort(descending=True).values
    return float(squares[: channel_count(len(squares), share)].sum() / squares.sum().clamp(min=1e-30))


def _profile(error: Tensor) -> dict[str, Any]:
    scores = channel_scores(error, None).sort(descending=True).values
    captured = scores.square().cumsum(0) / scores.square().sum().clamp(min=1e-30)
    points = torch.linspace(0, len(scores) - 1, min(PROFILE_POINTS, len(scores))).round().long()
    return {
        "k": ((points + 1) / len(scores)).tolist(),
        "scores": scores[points].tolist(),
        "energy": captured[points].tolist(),
        "heat": _binned(error.abs()).tolist(),
    }


def _binned(error: Tensor) -> Tensor:
    """(tokens, channels) -> at most HEAT_TOKENS x HEAT_CHANNELS, the largest of each bin of channels."""
    rows = error[torch.linspace(0, len(error) - 1, min(HEAT_TOKENS, len(error))).round().long()]
    bins = torch.arange(rows.shape[1]) * min(HEAT_CHANNELS, rows.shape[1]) // rows.shape[1]
    binned = rows.new_zeros(len(rows), int(bins[-1]) + 1)
    return binned.scatter_reduce_(1, bins.expand(len(rows), -1).to(rows.device), rows, "amax")
