"""The text of `lowbitrl plan --size`: every precision side by side, or one recipe part by part.

Columns of the first: bytes of a version, which are also what a served engine is sent a step; their share of the same in
the compute dtype; the learner with everything; weights of the rollout in either engine; its key/value cache.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from lowbitrl.quant import resolve
from lowbitrl.quant.recipe import PRECISIONS
from lowbitrl.sizing.memory import Estimate, Item, estimate
from lowbitrl.sizing.request import SizeRequest
from lowbitrl.sizing.shape import Shape, itemsize, load_shape

GIB = 2**30


def size_lines(name: str, request: SizeRequest, every_precision: bool) -> Iterator[str]:
    """Lines of text, tables in Markdown; sizes in GiB.

    Args:
        every_precision: compare all rollout precisions instead of taking the recipe's apart.

    Raises:
        ValueError, OSError: as `load_shape` and `resolve`, or sequences longer than the model's positions.
    """
    model, shape = load_shape(name)
    _check_length(model, request)
    total = sum(p.numel() for p in model.parameters())
    one = shape.cache_bytes(1, itemsize(request.config.model.dtype))
    yield f"{name}: {total:,} parameters, {_kind(shape)}; key/value cache {one:,} bytes a token"
    yield _setting(request)
    yield ""
    if every_precision:
        yield from _compare(model, shape, request)
    else:
        plan = resolve(request.config.recipe, model)
        yield plan.summary()
        yield from _parts(estimate(model, shape, plan, request))


def _check_length(model: Any, request: SizeRequest) -> None:
    limit = getattr(model.config, "max_position_embeddings", None)
    if limit is not None and request.tokens > limit:
        raise ValueError(
            f"--prompt-tokens {request.prompt_tokens} and rollout.max_tokens={request.config.rollout.max_tokens} "
            f"pass the model's {limit} positions; lower one"
        )


def _kind(shape: Shape) -> str:
    if not shape.num_experts:
        return f"{shape.num_hidden_layers} layers, dense"
    return f"{shape.num_hidden_layers} layers, {shape.num_experts_per_tok} of {shape.num_experts} experts a token"


def _setting(request: SizeRequest) -> str:
    config = request.config
    return (
        f"{request.ranks} rank{'s' * (request.ranks > 1)}, {config.model.dtype}, {config.optimizer.name}, "
        f"{config.optimizer.masters} masters; micro-batches of {config.trainer.micro_batch_tokens} tokens, gradient "
        f"checkpointing {'on' if config.trainer.gradient_checkpointing else 'off'}; engine {config.rollout.engine}, "
        f"{request.sequences} sequences of {request.prompt_tokens} + {config.rollout.max_tokens} tokens at once"
    )


def _compare(model: Any, shape: Shape, request: SizeRequest) -> Iterator[str]:
    """Precisions whose weights have the same sizes share a line."""
    learners = ["learner, one process"] + [f"learner, each of {request.ranks}"] * (request.ranks > 1)
    header = ["rollout", "published", "of BF16", *learners, "embedded", "vLLM", "KV cache"]
    rows: dict[tuple[str, ...], list[str]] = {}
    refused: list[str] = []
    for precision in PRECISIONS:
        try:
            rows.setdefault(_row(model, shape, request, precision), []).append(precision)
        except ValueError as error:
            refused.append(f"{precision}: {error}")
    yield from _table(header, [(", ".join(names), *cells) for cells, names in rows.items()])
    yield from refused


def _row(model: Any, shape: Shape, request: SizeRequest, precision: str) -> tuple[str, ...]:
    plan = resolve(replace(request.config.recipe, rollout=precision), model)
    sized = {
        (ranks, engine): estimate(model, shape, plan, _variant(request, ranks, engine))
        for ranks in sorted({1, request.ranks})
        for engine in ("embedded", "vllm")
    }
    ours, vllm = (sized[request.ranks, engine] for engine in ("embedded", "vllm"))
    learners = [Estimate.total(sized[ranks, "embedded"].learner) for ranks in sorted({1, request.ranks})]
    sizes = map(_gib, (*learners, ours.served, vllm.served, ours.cache))
    return (_gib(ours.published), f"{ours.published / ours.unquantized:.0%}", *sizes)


def _variant(request: SizeRequest, ranks: int, engine: str) -> SizeRequest:
    rollout = request.config.rollout.model_copy(update={"engine": engine})
    config = request.config.model_copy(update={"rollout": rollout})
    return request.model_copy(update={"ranks": ranks, "config": config})


def _parts(sized: Estimate) -> Iterator[str]:
    sides = {"learner": sized.learner, "rollout": sized.rollout}
    for side, items in sides.items():
        yield ""
        yield from _table(
            (f"{side}, a process", "GiB"),
            [*_cells(items), (f"{side} on the GPU", _gib(Estimate.total(items)))],
        )
    yield ""
    yield from _table(("a step moves", "GiB"), _cells(sized.step))


def _cells(items: Sequence[Item]) -> list[tuple[str, ...]]:
    return [(item.name + ", on the host" * item.host, _gib(item.bytes)) for item in items]


def _gib(size: int) -> str:
    return f"{size / GIB:,.2f}"


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]
    for index, row in enumerate([header, *rows]):
        yield "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |"
        if not index:
            yield "|" + "|".join("-" * (width + 2) for width in widths) + "|"
