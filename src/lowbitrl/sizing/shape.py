"""The fields of a config.json that decide cache and activations, and a model of that shape without weights."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import AliasChoices, BaseModel, ConfigDict, Field, ValidationError, model_validator

from lowbitrl.models import load_skeleton
from lowbitrl.trainer.logprobs import check_head

Positive = Annotated[int, Field(gt=0, strict=True)]
CACHED = ("full_attention", "sliding_attention")
"""Kinds of layer whose cache is keys and values of a head."""


class Shape(BaseModel):
    """What sizes a model, under the names of its config.json; other fields are ignored.

    Attributes:
        head_dim / num_key_value_heads: unset, they follow from the heads.
        intermediate_size: of a dense MLP; of an expert where moe_intermediate_size is unset.
        num_experts: also as num_local_experts; unset in a dense model.
        query_key_norms: whether queries and keys are normalized, head by head; seen in the modules, not in the config.
        layer_types: "full_attention" or "sliding_attention" a layer; unset: all full.

    Example:
        Shape(model_type="llama", vocab_size=128256, hidden_size=2048, num_hidden_layers=16, num_attention_heads=32,
              num_key_value_heads=8, intermediate_size=8192).keys == 512
    """

    model_config = ConfigDict(frozen=True, extra="ignore", populate_by_name=True)

    model_type: str
    vocab_size: Positive
    hidden_size: Positive
    num_hidden_layers: Positive
    num_attention_heads: Positive
    intermediate_size: Positive
    num_key_value_heads: Positive | None = None
    head_dim: Positive | None = None
    num_experts: Positive | None = Field(
        default=None, validation_alias=AliasChoices("num_experts", "num_local_experts")
    )
    num_experts_per_tok: Positive | None = None
    moe_intermediate_size: Positive | None = None
    shared_expert_intermediate_size: Annotated[int, Field(ge=0, strict=True)] | None = None
    sliding_window: Annotated[int, Field(ge=0, strict=True)] | None = None
    layer_types: tuple[str, ...] | None = None
    query_key_norms: bool = False

    @model_validator(mode="after")
    def _can_be(self) -> Shape:
        heads, keys = self.num_attention_heads, self.num_key_value_heads or self.num_attention_heads
        if heads % keys:
            raise ValueError(f"num_key_value_heads={keys} does not divide num_attention_heads={heads}")
        if self.num_experts and not 0 < (self.num_experts_per_tok or 0) <= self.num_experts:
            raise ValueError(
                f"num_experts_per_tok={self.num_experts_per_tok} of num_experts={self.num_experts}: give how many a "
                "token takes"
            )
        return self

    @property
    def head(self) -> int:
        """Width of an attention head."""
        return self.head_dim or self.hidden_size // self.num_attention_heads

    @property
    def queries(self) -> int:
        """Width of all query heads."""
        return self.num_attention_heads * self.head

    @property
    def keys(self) -> int:
        """Width of all key heads, and of all value heads."""
        return (self.num_key_value_heads or self.num_attention_heads) * self.head

    def cache_bytes(self, tokens: int, itemsize: int) -> int:
        """Keys and values of a sequence of `tokens` tokens; a sliding layer keeps its window at most."""
        kinds = self.layer_types or ("full_attention",) * self.num_hidden_layers
        window = self.sliding_window or tokens
        kept = sum(min(window, tokens) if kind == CACHED[1] else tokens for kind in kinds)
        return 2 * self.keys * itemsize * kept


def load_shape(name: str) -> tuple[Any, Shape]:
    """The architecture of a model on the meta device, and its shape.

    Args:
        name: a config's .json file, or what `load_skeleton` takes.

    Raises:
        ValueError: as `shape_of`, or a file that is no config.
        OSError: as `load_skeleton`.
    """
    path = Path(name).expanduser()
    file = path / "config.json" if path.is_dir() else path
    if file.suffix == ".json" and (file.is_file() or not path.is_dir()):
        # Before transformers sees it, which fills what is missing with the sizes of some model.
        _validated(name, _read(file))
    skeleton = load_skeleton(name)
    return skeleton, shape_of(skeleton, name)


def shape_of(model: Any, name: str) -> Shape:
    """The shape of a transformers model, which may be on the meta device.

    Args:
        name: what errors call it.

    Raises:
        ValueError: a config that lacks a size or holds none in its place, all named; an attention whose cache is
            another than keys and values of its heads; logits that the learner refuses.
    """
    config = model.config
    check_head(model)
    _check_attention(name, config)
    fields = {alias for field in Shape.model_fields for alias in _aliases(field)}
    given = {field: getattr(config, field) for field in fields if getattr(config, field, None) is not None}
    normed = any(part.endswith("q_norm") for part, _ in model.named_modules())
    return _validated(name, given | {"query_key_norms": normed})


def _read(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise FileNotFoundError(
            f"{path} does not exist; give a config.json, a checkpoint folder or a hub id"
        ) from error
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read as a config's JSON: {error}") from error
    if not isinstance(data, dict):
        raise ValueError(f"{path} holds a {type(data).__name__}, no config; give a model's config.json")
    return data


def _validated(name: str, data: dict[str, Any]) -> Shape:
    try:
        return Shape.model_validate(data)
    except ValidationError as error:
        raise ValueError(f"{name}: {'; '.join(_explained(error))}") from error


def _explained(error: ValidationError) -> Iterator[str]:
    for e in error.errors():
        message = e["msg"].removeprefix("Value error, ")
        if e["type"] != "missing":
            yield f"{e['loc'][0]}={e['input']!r}: {message.lower()}" if e["loc"] else message
    if missing := [str(e["loc"][0]) for e in error.errors() if e["type"] == "missing"]:
        yield f"its config has no {', '.join(missing)}; families that name their sizes otherwise are not sized"


def _aliases(field: str) -> list[str]:
    alias = Shape.model_fields[field].validation_alias
    return [field] if alias is None else [str(choice) for choice in alias.choices]  # type: ignore[union-attr]


def _check_attention(name: str, config: Any) -> None:
    if getattr(config, "kv_lora_rank", None):
        raise ValueError(
            f"{name}: kv_lora_rank={config.kv_lora_rank}: latent attention, whose cache is not sized here"
        )
    kinds = getattr(config, "layer_types", None) or ()
    other = next((kind for kind in kinds if kind not in CACHED), None)
    if other is not None:
        raise ValueError(
            f"{name}: a layer of type {other!r} has another cache than keys and values; not sized here"
        )


def itemsize(dtype: str) -> int:
    """Bytes of a number of a compute dtype's name."""
    return getattr(torch, dtype).itemsize
