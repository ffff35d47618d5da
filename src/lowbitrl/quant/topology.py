"""Which modules of a transformers model can wear a format, and which must share a global scale.

Engines fuse q/k/v and gate/up into one matrix with one tensor scale, so quantizing the parts
with scales of their own would serve other weights than the learner trained on.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from fnmatch import fnmatchcase

from torch import nn

FUSED_SIBLINGS: tuple[tuple[str, ...], ...] = (
    ("q_proj", "k_proj", "v_proj"),
    ("gate_proj", "up_proj"),
    ("w1", "w3"),
    ("q_a_proj", "kv_a_proj_with_mqa"),
)
ROUTER_LEAVES = ("gate", "router")
TIED = "output head, tied to the embedding"


def quantizable(model: nn.Module) -> dict[str, nn.Linear]:
    """Linear modules of `model` by whole name, in model order.

    Raises:
        ValueError: the model has weight stacks of three or more dimensions (fused experts):
            they are no linears, so a plan would leave them in BF16 unnoticed.
    """
    for name, parameter in model.named_parameters():
        if parameter.ndim >= 3 and "conv" not in name:
            raise ValueError(
                f"{name} has shape {tuple(parameter.shape)}: fused expert stacks are not supported, and "
                "leaving them unquantized would go unnoticed; use a dense model"
            )
    return {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}


def fused_groups(names: Sequence[str]) -> list[tuple[str, ...]]:
    """Partition `names` into groups that share one global scale (most are groups of one).

    Example:
        >>> fused_groups(["a.q_proj", "a.k_proj", "a.v_proj", "a.o_proj"])
        [('a.q_proj', 'a.k_proj', 'a.v_proj'), ('a.o_proj',)]
    """
    known, done, groups = set(names), set(), []
    for name in names:
        if name not in done:
            group = tuple(n for n in _siblings(name) if n in known)
            done.update(group)
            groups.append(group)
    return groups


def _siblings(name: str) -> Iterator[str]:
    parent, dot, leaf = name.rpartition(".")
    for family in FUSED_SIBLINGS:
        if leaf in family:
            yield from (parent + dot + member for member in family)
            return
    yield name


def match_all(patterns: Iterable[str], names: Sequence[str]) -> dict[str, str]:
    """The one matcher: whole module name -> the first glob pattern that names it.

    Raises:
        ValueError: a pattern matches no name (a typo would silently quantize the layer).
    """
    matched: dict[str, str] = {}
    for pattern in patterns:
        hits = [name for name in names if fnmatchcase(name, pattern)]
        if not hits:
            raise ValueError(
                f"keep pattern {pattern!r} matches no linear module of this model; names look like "
                f"{', '.join(names[:3])} (patterns are globs over whole names, '*' crosses dots)"
            )
        for name in hits:
            matched.setdefault(name, pattern)
    return matched


def kept_by_default(model: nn.Module, names: Sequence[str]) -> dict[str, str]:
    """Reasons for the modules that stay in BF16 when a recipe does not say: output head, routers."""
    head = getattr(model, "get_output_embeddings", lambda: None)()
    modules = dict(model.named_modules())
    reasons = {}
    for name in names:
        if modules[name] is head:
            tied = tied_to_embedding(model, head)
            reasons[name] = TIED if tied else "output head"
        elif name.rpartition(".")[2] in ROUTER_LEAVES:
            reasons[name] = "router"
    return reasons


def tied_to_embedding(model: nn.Module, module: nn.Module) -> bool:
    """Whether `module` shares its weight with the input embedding."""
    embedding = getattr(model, "get_input_embeddings", lambda: None)()
    return embedding is not None and getattr(embedding, "weight", None) is getattr(module, "weight", embedding)
