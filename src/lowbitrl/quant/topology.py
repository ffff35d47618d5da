"""Which modules of a transformers model can wear a format, and which must share a global scale.

Engines fuse q/k/v and gate/up into one matrix with one tensor scale, so quantizing the parts
with scales of their own would serve other weights than the learner trained on. The experts of an
MoE block are no linears but stacks of them, one parameter for all; `stacks.py` knows their layout.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from fnmatch import fnmatchcase

from torch import nn

from lowbitrl.quant.stacks import STACKS, is_expert_module

FUSED_SIBLINGS: tuple[tuple[str, ...], ...] = (
    ("q_proj", "k_proj", "v_proj"),
    ("gate_proj", "up_proj"),
    ("w1", "w3"),
    ("q_a_proj", "kv_a_proj_with_mqa"),
)
ROUTER_LEAVES = ("gate", "router", "shared_expert_gate")
SITES = ("attention", "w13", "w2", "other")
W13_LEAVES = ("gate_proj", "up_proj", "gate_up_proj", "w1", "w3")
W2_LEAVES = ("down_proj", "w2")
TIED = "output head, tied to the embedding"


def quantizable(model: nn.Module) -> dict[str, nn.Linear]:
    """Linear modules of `model` by whole name, in model order."""
    return {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}


def expert_stacks(model: nn.Module) -> dict[str, nn.Module]:
    """Experts modules by whole name of each of their weight stacks: "....mlp.experts.down_proj"."""
    return {
        f"{name}.{leaf}".lstrip("."): module
        for name, module in model.named_modules()
        if is_expert_module(module)
        for leaf in STACKS
        if isinstance(getattr(module, leaf, None), nn.Parameter)
    }


def unsupported_stacks(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """Parameters that look like experts' weights and are nothing a plan can quantize, with their shapes.

    Three or more dimensions anywhere but in a convolution, or two and more below a module named
    after experts that is neither a linear nor a stack known to `expert_stacks`.
    """
    found, modules = {}, dict(model.named_modules())
    known = expert_stacks(model)
    for name, parameter in model.named_parameters():
        owner = modules[name.rpartition(".")[0]]
        if name in known or is_expert_module(owner) or isinstance(owner, nn.Linear | nn.Embedding):
            continue
        expert = any(part.startswith("expert") for part in name.split(".")[:-1])
        if parameter.ndim >= (2 if expert else 3) and "conv" not in name:
            found[name] = tuple(parameter.shape)
    return found


def routers(model: nn.Module) -> dict[str, nn.Module]:
    """Top-k routers by whole name, in model order: the module beside an experts module that chooses among them."""
    modules = dict(model.named_modules())
    blocks = {name.rpartition(".")[0] for name, module in modules.items() if is_expert_module(module)}
    return {
        name: module
        for name, module in modules.items()
        if name.rpartition(".")[0] in blocks and hasattr(module, "top_k") and hasattr(module, "num_experts")
        if isinstance(getattr(module, "weight", None), nn.Parameter)
    }


def site_of(name: str) -> str:
    """Which activation site a module's input is: "attention", "w13" (gate and up), "w2" (down) or "other".

    Example:
        >>> site_of("model.layers.0.mlp.experts.gate_up_proj")
        'w13'
    """
    leaf = name.rpartition(".")[2]
    if leaf in W13_LEAVES:
        return "w13"
    if leaf in W2_LEAVES:
        return "w2"
    return "attention" if "attn" in name or "attention" in name else "other"


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
        if head is not None and modules.get(name) is head:
            tied = tied_to_embedding(model, head)
            reasons[name] = TIED if tied else "output head"
        elif name.rpartition(".")[2] in ROUTER_LEAVES:
            reasons[name] = "router"
    return reasons


def tied_to_embedding(model: nn.Module, module: nn.Module) -> bool:
    """Whether `module` shares its weight with the input embedding."""
    embedding = getattr(model, "get_input_embeddings", lambda: None)()
    return embedding is not None and getattr(embedding, "weight", None) is getattr(
        module, "weight", embedding
    )
