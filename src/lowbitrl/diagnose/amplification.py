"""How far a recipe carries noise that no one would notice: the part of a mismatch no alignment removes.

    h_0' = h_0 * (1 + noise * z),  z standard normal, one seed;   everything in fp32
    moved = mean_t |log p(noisy) - log p(clean)|
    per layer: ||h_l' - h_l|| / ||h_l|| over real tokens

Continuous arithmetic hands noise on in proportion. Quantized activations flip codes: once a code
flips, later layers carry the flip whatever the noise was, so `moved` does not depend on its size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from lowbitrl.diagnose.lab import Drawn, Lab, Scores, worn
from lowbitrl.diagnose.mismatch import differences
from lowbitrl.diagnose.statistics import bootstrap
from lowbitrl.diagnose.table import rollout_label
from lowbitrl.quant import Recipe

NOISES = (1e-7, 1e-6, 1e-4)


def amplify(
    lab: Lab,
    recipes: Sequence[Recipe],
    tokens: int,
    noises: Sequence[float] = NOISES,
    seed: int = 0,
    tick: Callable[[str], None] = lambda _: None,
) -> list[dict[str, Any]]:
    """One row a rollout arithmetic and noise: nats moved with interval, and divergence by layer.

    Args:
        tokens: about how many sampled tokens are scored.
    """
    drawn, rows = lab.drawn.head(tokens), []
    for name, recipe in {rollout_label(r): worn(r, "rollout") for r in recipes}.items():
        tick(name)
        model = lab.model(recipe, "rollout", dtype=torch.float32)
        clean, clean_layers = _traced(lab, model, drawn, 0.0, seed)
        for noise in noises:
            noisy, layers = _traced(lab, model, drawn, noise, seed)
            moved = bootstrap([d.abs() for d in differences(noisy, clean)])
            rows.append(
                {"rollout": name, "noise": noise, "moved": moved, "layers": _growth(layers, clean_layers)}
            )
    return rows


def moved_at(rows: Sequence[dict[str, Any]], noise: float) -> dict[str, float]:
    """Mean nats moved by one size of noise, by rollout."""
    return {row["rollout"]: row["moved"][0] for row in rows if row["noise"] == noise}


def first_layer(layers: Sequence[float], noise: float, factor: float = 100.0) -> int | None:
    """The first layer whose output moved `factor` times the noise; None where none did."""
    return next((i for i, moved in enumerate(layers) if moved > factor * noise), None)


def _traced(
    lab: Lab, model: PreTrainedModel, drawn: Drawn, noise: float, seed: int
) -> tuple[Scores, list[list[Tensor]]]:
    with layer_outputs(model) as layers, embedding_noise(model, noise, seed):
        return lab.score(model, drawn), layers


def _growth(noisy: list[list[Tensor]], clean: list[list[Tensor]]) -> list[float]:
    """Relative L2 of the difference, one number a layer, over all forward passes."""
    sums = [
        (
            sum(float((a - b).square().sum()) for a, b in zip(n, c, strict=True)),
            sum(float(b.square().sum()) for b in c),
        )
        for n, c in zip(noisy, clean, strict=True)
    ]
    return [(moved / size) ** 0.5 for moved, size in sums]


@contextmanager
def embedding_noise(model: PreTrainedModel, noise: float, seed: int) -> Iterator[None]:
    """Multiply the input embeddings by 1 + noise * z inside the block; the same z for the same seed."""
    generator = torch.Generator().manual_seed(seed)

    def hook(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
        z = torch.randn(output.shape, generator=generator, dtype=torch.float32).to(output.device)
        return (output.float() * (1 + noise * z)).to(output.dtype)

    embedding = model.get_input_embeddings()
    assert isinstance(embedding, nn.Module)
    handle = embedding.register_forward_hook(hook)
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def layer_outputs(model: PreTrainedModel) -> Iterator[list[list[Tensor]]]:
    """Real tokens' outputs of every decoder layer, (n, H) a forward pass, listed by layer."""
    layers = decoder_layers(model)
    found: list[list[Tensor]] = [[] for _ in layers]

    def hook(index: int) -> Callable[[nn.Module, Any, Any], None]:
        def record(module: nn.Module, args: Any, output: Any) -> None:
            hidden = output[0] if isinstance(output, tuple) else output
            real = model.__dict__["lowbitrl"].tokens.real
            found[index].append(hidden[real] if real is not None else hidden.flatten(0, -2))

        return record

    handles = [layer.register_forward_hook(hook(i)) for i, layer in enumerate(layers)]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


def decoder_layers(model: PreTrainedModel) -> nn.ModuleList:
    """The stack of decoder layers.

    Raises:
        ValueError: the model has no such stack where transformers' causal LMs have it.
    """
    layers = getattr(model.base_model, "layers", None)
    if not isinstance(layers, nn.ModuleList):
        raise ValueError(
            f"{type(model.base_model).__name__} has no `layers`: per-layer figures need a decoder-only transformer"
        )
    return layers
