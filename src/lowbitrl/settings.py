"""Every setting of a recipe: default, bounds and meaning, as read from the configs themselves."""

from __future__ import annotations

import ast
import difflib
import inspect
import re
import textwrap
from collections.abc import Iterator
from dataclasses import MISSING, dataclass, fields, is_dataclass
from typing import Any, get_type_hints

from pydantic import BaseModel

from lowbitrl.config import RunConfig

TOP = "top"


@dataclass(frozen=True)
class Setting:
    """One key: dotted name, type, default as TOML would show it, bounds, meaning."""

    name: str
    type: str
    default: str
    bounds: str
    meaning: str


def sections() -> dict[str, type]:
    """The classes behind a recipe's sections, by name; `TOP` for the keys outside them."""
    types = {name: f.annotation for name, f in RunConfig.model_fields.items()}
    return {TOP: RunConfig} | {n: t for n, t in types.items() if isinstance(t, type) and _is_section(t)}


def settings(section: str) -> list[Setting]:
    """The keys of a section in the order of their class.

    Raises:
        ValueError: no such section; the nearest one is named.
    """
    known = sections()
    if section not in known:
        near = difflib.get_close_matches(section, known, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"sections: {', '.join(known)}"
        raise ValueError(f"section {section!r} is unknown; {hint}")
    kind = known[section]
    meanings = _meanings(kind)
    return [
        Setting(name if section == TOP else f"{section}.{name}", *facts, meanings.get(name, ""))
        for name, facts in _facts(kind)
        if not (section == TOP and name in known)
    ]


def markdown() -> str:
    """docs/settings.md."""
    head = (
        "# Settings\n\nMade by `lowbitrl settings --markdown`; a test compares. Each is a key of a recipe's section "
        "and an option of `train`, `evaluate`, `plan`, `quantize` and `compare`: `--rollout.samples 8`.\n"
    )
    return head + "".join(_markdown(name, kind) for name, kind in sections().items())


def _markdown(name: str, kind: type) -> str:
    title = "Outside the sections" if name == TOP else f"`[{name}]`"
    rows = "".join(
        f"| `{s.name}` | {_cell(s.type)} | `{_cell(s.default)}` | {_cell(s.bounds)} | {_cell(s.meaning)} |\n"
        for s in settings(name)
    )
    summary = (inspect.getdoc(kind) or "").split("\n")[0]
    return f"\n## {title}\n\n{summary}\n\n| key | type | default | bounds | meaning |\n|---|---|---|---|---|\n{rows}"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _is_section(kind: type) -> bool:
    return is_dataclass(kind) or issubclass(kind, BaseModel)


def _facts(kind: Any) -> Iterator[tuple[str, tuple[str, str, str]]]:
    """(name, (type, default, bounds)) of every field."""
    if is_dataclass(kind):
        hints = get_type_hints(kind)
        for field in fields(kind):
            default = "required" if field.default is MISSING else _shown(field.default)
            yield field.name, (_type(hints[field.name]), default, "")
        return
    for name, field in kind.model_fields.items():
        default = "required" if field.is_required() else _shown(field.get_default(call_default_factory=True))
        yield name, (_type(field.annotation), default, _bounds(field.metadata))


def _shown(value: Any) -> str:
    if value is None:
        return "unset"
    return str(value).lower() if isinstance(value, bool) else repr(value)


def _bounds(metadata: list[Any]) -> str:
    signs = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<", "min_length": "length >=", "pattern": "matches"}
    found = [f"{sign} {getattr(m, k)}" for m in metadata for k, sign in signs.items() if _has(m, k)]
    return ", ".join(found)


def _has(constraint: Any, name: str) -> bool:
    return getattr(constraint, name, None) is not None


def _type(annotation: Any) -> str:
    """As Python writes it, without what the other columns say: bounds, and None for what may be unset."""
    text = inspect.formatannotation(annotation).replace("typing.", "")
    text = re.sub(r"Annotated\[(\w+), [^\[]*?\(.*?\)\]\)\]|Annotated\[(\w+), .*?\)\]", r"\1\2", text)
    text = re.sub(r" \| None|Optional\[(.*)\]", r"\1", text)
    return re.sub(r"Literal\[(.*?)\]", lambda m: m[1].replace(", ", " or "), text)


def _meanings(kind: type) -> dict[str, str]:
    """By field: the "Attributes:" of the class docstring, and strings that follow fields in its body."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(kind))).body[0]
    assert isinstance(tree, ast.ClassDef)
    found = _attributes(inspect.getdoc(kind) or "", {n.target.id for n in tree.body if _is_field(n)})  # type: ignore[attr-defined]
    for before, after in zip(tree.body, tree.body[1:], strict=False):
        if _is_field(before) and isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
            found[before.target.id] = " ".join(str(after.value.value).split())  # type: ignore[attr-defined]
    return found


def _is_field(node: ast.stmt) -> bool:
    return isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)


def _attributes(doc: str, names: set[str]) -> dict[str, str]:
    """Entries "a: text", "a / b: text" and "a, b: text", also several on a line ("a: text. b: text")."""
    _, _, block = doc.partition("Attributes:\n")
    text = " ".join(re.split(r"\n\s*\n", block)[0].split())
    name = "|".join(sorted(map(re.escape, names), key=len, reverse=True))
    heads = list(re.finditer(rf"(?:^|(?<=[.;\"`)] )|(?<= ))((?:{name})(?:(?: / |, )(?:{name}))*): ", text))
    meanings: dict[str, str] = {}
    for head, following in zip(heads, [*heads[1:], None], strict=False):
        meaning = text[head.end() : following.start() if following else None].strip()
        meanings |= dict.fromkeys(re.split(r" / |, ", head[1]), meaning)
    return meanings
