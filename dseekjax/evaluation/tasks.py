"""Tasks in files of JSON lines: choices of which one is right, and continuations."""

import codecs
import importlib.resources
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pydantic_core

from dseekjax.data.reading.inputs import BUILTIN, Input, find_inputs
from dseekjax.data.reading.open_bytes import open_bytes
from dseekjax.errors import UserError

FORMS = '{"context": …, "choices": […], "answer": 0} or {"context": …, "continuation": …}'


@dataclass(frozen=True)
class Choice:
    """A context with several continuations, one of which is right."""

    line: int
    """In its file, from 1."""
    context: str
    choices: tuple[str, ...]
    answer: int
    """Index of the right one, from 0."""


@dataclass(frozen=True)
class Continuation:
    """A context and what follows it."""

    line: int
    context: str
    continuation: str


@dataclass(frozen=True)
class Task:
    """The items of a file, all of one kind."""

    name: str
    """Its path, from the working folder if it is in there, or what built in it is."""
    path: Path
    items: tuple[Choice, ...] | tuple[Continuation, ...]


def read_tasks(pattern: str) -> list[Task]:
    """The tasks of the files that a pattern, or `builtin:emma_endings`, names.

    Raises:
        UserError: there is no such file, it has no item, or a line is none.
    """
    if not pattern.startswith(BUILTIN):
        return [_read(file, _name(Path(file.path))) for file in find_inputs([pattern])]
    folder = Path(str(importlib.resources.files("dseekjax.evaluation"))) / "examples"
    path = folder / f"{pattern.removeprefix(BUILTIN)}.jsonl"
    if not path.is_file():
        known = ", ".join(sorted(f"{BUILTIN}{file.stem}" for file in folder.glob("*.jsonl")))
        raise UserError(f"there is no task {pattern}; built in is {known}")
    return [_read(file, pattern) for file in find_inputs([str(path)])]


def _read(file: Input, name: str) -> Task:
    items: list[Any] = []
    try:
        with open_bytes(file) as stream:
            for number, line in enumerate(stream, start=1):
                if number == 1:
                    line = line.removeprefix(codecs.BOM_UTF8)
                if line.strip():
                    items.append(_item(line, number, f"{file.path} line {number}"))
                    if type(items[-1]) is not type(items[0]):
                        raise UserError(
                            f"{file.path} line {number} is a {_kind(items[-1])} and line {items[0].line} a "
                            f"{_kind(items[0])}; put them into files of their own"
                        )
    except OSError as error:
        raise UserError(f"cannot read {file.path} ({error.strerror or error}); mend that and run again") from error
    if not items:
        raise UserError(f"{file.path} has no item; give lines of the form {FORMS}")
    return Task(name, Path(file.path), tuple(items))


def _name(path: Path) -> str:
    here = Path.cwd()
    return str(path.relative_to(here) if path.is_relative_to(here) else path)


def _kind(item: Choice | Continuation) -> str:
    return type(item).__name__.lower()


def _item(line: bytes, number: int, place: str) -> Choice | Continuation:
    try:
        values = pydantic_core.from_json(line)
    except ValueError as error:
        reason = str(error).replace(" at line 1 column", " at column")
        raise UserError(f"{place} is no JSON ({reason}); mend it") from error
    if not isinstance(values, dict) or not ({"choices", "continuation"} & values.keys()):
        raise UserError(f"{place} is no item; give {FORMS}")
    context = _text(values, "context", place, may_be_empty=True)
    if "choices" not in values:
        return Continuation(number, context, _text(values, "continuation", place))
    if "continuation" in values:
        raise UserError(f"{place} has both choices and a continuation; leave one of them out")
    choices, answer = values["choices"], values.get("answer")
    if not isinstance(choices, list) or len(choices) < 2:
        raise UserError(f"{place} has {_count(choices)} for its choices; give a list of two or more texts")
    texts = tuple(_text({"choice": choice}, "choice", place) for choice in choices)
    if type(answer) is not int:
        raise UserError(f"{place} has {answer!r} for its answer; give the number of the right choice, from 0")
    if not 0 <= answer < len(texts):
        raise UserError(
            f"{place} has {answer} for its answer, and choices from 0 to {len(texts) - 1}; give the number of one"
        )
    return Choice(number, context, texts, answer)


def _count(choices: Any) -> str:
    return f"a list of {len(choices)}" if isinstance(choices, list) else f"a {type(choices).__name__}"


def _text(values: Mapping[str, Any], field: str, place: str, *, may_be_empty: bool = False) -> str:
    if field not in values:
        raise UserError(f"{place} has no {field}; give {FORMS}")
    text = values[field]
    if not isinstance(text, str):
        raise UserError(f"{place} has a {type(text).__name__} for a {field}; give a text")
    if not text and not may_be_empty:
        raise UserError(f"{place} has an empty {field}; give some text")
    return text
