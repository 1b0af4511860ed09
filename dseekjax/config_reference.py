"""Every key of the config with its type, default and meaning, read off the models."""

import dataclasses
import types
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo


@dataclass(frozen=True)
class Key:
    name: str
    type: str
    default: str
    meaning: str


def describe(model: type[BaseModel], prefix: str = "") -> Iterator[Key]:
    """All keys below a config model, in order, each once; what differs among members of a union is joined."""
    found: dict[str, Key] = {}
    for key in _describe(model, prefix):
        before = found.get(key.name, key)
        same = before.type == key.type
        found[key.name] = before if same else dataclasses.replace(before, type=f"{before.type}|{key.type}")
    yield from found.values()


def _describe(model: type[BaseModel], prefix: str) -> Iterator[Key]:
    for name, field in model.model_fields.items():
        sections = list(_sections(field.annotation))
        if field.description is not None:
            yield Key(prefix + name, _type(field.annotation), _default(field), field.description)
        for section in sections:
            yield from _describe(section, f"{prefix}{name}.")


def format_reference(model: type[BaseModel]) -> str:
    """A table for the terminal."""
    keys = list(describe(model))
    width = max(len(key.name) for key in keys) + 2
    lines = []
    for key in keys:
        lines.append(f"  {key.name:<{width}}{key.type}" + (f", default {key.default}" if key.default else ""))
        lines.append(f"  {'':<{width}}{key.meaning}")
    return "\n".join(lines)


def _sections(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in typing.get_args(annotation):
        yield from _sections(argument)


def _type(annotation: Any) -> str:
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Literal:
        return "|".join(map(str, arguments))
    if origin in (typing.Union, types.UnionType):
        return " or ".join("null" if a is type(None) else _type(a) for a in arguments)
    if origin is tuple:
        return "list"
    return getattr(annotation, "__name__", str(annotation))


def _default(field: FieldInfo) -> str:
    if field.default_factory is not None:
        return (field.default_factory.__doc__ or "").strip().rstrip(".").lower()
    if field.is_required():
        return ""
    default = field.default
    if default is None:
        return "null"
    if isinstance(default, tuple):
        return "[" + ", ".join(getattr(item, "path", str(item)) for item in default) + "]"
    return str(default).lower() if isinstance(default, bool) else str(default)
