"""Config errors as sentences."""

import difflib
from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel, ValidationError

from dseekjax.config_reference import describe


def explain(error: ValidationError, values: dict[str, Any], root: type[BaseModel]) -> Iterator[str]:
    """One sentence per problem: the key, the value, what to do.

    Args:
        error: what pydantic found.
        values: what was validated.
        root: the model that it was validated against.
    """
    known = {key.name: key for key in describe(root)}
    problems = error.errors()
    for problem in problems:
        key = _key(problem["loc"], values)
        meaning = known.get(_without_numbers(key))
        if problem["type"] == "extra_forbidden" and meaning is not None:
            section, _, last = key.rpartition(".")
            kind = _value(values, problem["loc"][:-1]).get("kind")
            yield (
                f"{section} of kind {kind} has no {last}; leave it out, or give all of it anew, as in "
                f"'{section}={{kind: {kind}}}'"
            )
        elif problem["type"] == "extra_forbidden":
            yield f"unknown key {key}" + _suggestion(_without_numbers(key), list(known))
        elif problem["type"] == "default_factory_not_called":
            continue  # It depends on a value that has a problem of its own.
        elif problem["type"] == "too_short" and any(_inside(other["loc"], problem["loc"]) for other in problems):
            continue  # Its items were left out for problems of their own.
        elif problem["type"] == "union_tag_invalid":
            yield f"{key}.kind: {problem['ctx']['tag']!r} is wrong; it takes {problem['ctx']['expected_tags']}"
        elif problem["type"] == "model_type":
            yield _no_section(problem["input"], key, list(known))
        elif problem["type"] == "missing":
            yield f"{key} is missing" + (f": {meaning.meaning}" if meaning else "")
        elif problem["type"] == "value_error":
            for message in str(problem["ctx"]["error"]).splitlines():
                yield f"{key}.{message}" if key and meaning is None else f"{key} {message}".strip()
        else:
            wanted = f"; it takes {meaning.type}" if meaning else ""
            reason = problem["msg"].lower().replace("a valid tuple", "a list, as in [a, b]")
            yield f"{key}: {problem['input']!r} is wrong: {reason}{wanted}"


def _no_section(value: Any, key: str, known: list[str]) -> str:
    # A union's member comes last in the place, and is no key.
    while not (inside := [name for name in known if name.startswith(f"{_without_numbers(key)}.")]):
        key = key.rpartition(".")[0]
    has_kinds = f"{_without_numbers(key)}.kind" in inside and isinstance(value, str)
    example = f"'{key}={{kind: {value}}}'" if has_kinds else f"{key}.{inside[0].rpartition('.')[2]}=VALUE"
    return f"{key}: {value!r} is wrong: it is a section of keys; give those, as in {example}"


def _inside(location: tuple[int | str, ...], outer: tuple[int | str, ...]) -> bool:
    return len(location) > len(outer) and location[: len(outer)] == outer


def _value(values: Any, location: tuple[int | str, ...]) -> Any:
    """What is at a place that `_key` names."""
    for name in location:
        # What is not there is the name of a union's member.
        if (isinstance(values, dict) and name in values) or isinstance(name, int):
            values = values[name]
    return values


def _key(location: tuple[int | str, ...], values: Any) -> str:
    """The dotted key of a place, without the names of union members that pydantic puts between."""
    names = []
    for i, name in enumerate(location):
        inside = isinstance(values, dict) and name in values
        inside = inside or (isinstance(values, list | tuple) and isinstance(name, int) and name < len(values))
        if inside or i == len(location) - 1:
            names.append(str(name))
            values = values[name] if inside else None
    return ".".join(names)


def _without_numbers(key: str) -> str:
    return ".".join(name for name in key.split(".") if not name.isdecimal())


def _suggestion(key: str, known: list[str]) -> str:
    section, _, last = key.rpartition(".")
    siblings = {name.rpartition(".")[2]: name for name in known if name.rpartition(".")[0] == section}
    elsewhere = [name for name in known if name.rpartition(".")[2] == last]
    close = elsewhere or [siblings[name] for name in difflib.get_close_matches(last, siblings, 1, 0.5)]
    # A section's own name is no key, yet it is what a misspelt section was meant to be.
    sections = sorted({name.partition(".")[0] for name in known})
    first = key.partition(".")[0]
    if first not in sections:
        close = close or difflib.get_close_matches(first, sections, 1, 0.6)
    close = close or difflib.get_close_matches(key, known, 1, 0.8)
    if close:
        return f"; did you mean {close[0]}?"
    return f"; {section or 'the config'} has {', '.join(siblings) or ', '.join(sections)}"
