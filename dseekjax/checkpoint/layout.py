"""How a TrainState lies in a checkpoint: two items of flat, named arrays."""

from collections.abc import Mapping
from typing import Any

import jax

from dseekjax.training.state import TrainState

ITEMS = ("params", "state")
"""Parameters are an item of their own, so that they can be read without the rest."""


def flatten(tree: Any) -> dict[str, Any]:
    """`{"runs.0.attention.query.kernel": array, …}`."""
    return {_name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def unflatten(named: Mapping[str, Any], like: Any) -> Any:
    """The inverse of `flatten`, into the structure of `like`."""
    return jax.tree_util.tree_map_with_path(lambda path, _: named[_name(path)], like)


def split(state: TrainState) -> dict[str, dict[str, Any]]:
    """The named arrays of each item."""
    items: dict[str, dict[str, Any]] = {item: {} for item in ITEMS}
    for name, leaf in flatten(state).items():
        inside = name.removeprefix("params.")
        items["state" if inside == name else "params"][inside] = leaf
    return items


def join(items: Mapping[str, Mapping[str, Any]], like: TrainState) -> TrainState:
    """The inverse of `split`."""
    named = {f"params.{name}": leaf for name, leaf in items["params"].items()}
    return unflatten({**named, **items["state"]}, like)


def _name(path: tuple[Any, ...]) -> str:
    return ".".join(str(getattr(key, "key", getattr(key, "name", getattr(key, "idx", key)))) for key in path)
