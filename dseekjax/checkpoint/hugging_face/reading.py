"""From tensor files to parameters on their devices."""

import functools
import re
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from dseekjax.checkpoint.hugging_face.families import Family
from dseekjax.checkpoint.hugging_face.mapping import Index, Mapped
from dseekjax.checkpoint.hugging_face.tensor_files import TensorFiles, some
from dseekjax.checkpoint.layout import flatten, unflatten
from dseekjax.errors import UserError

OUTPUT = "lm_head.weight"
ROWS_PER_COMPARISON = 4096


def import_parameters(
    files: TensorFiles, family: Family, shapes: Any, *, watch: Callable[[int, int], None] = lambda done, total: None
) -> Any:
    """Reads parameters, each device its own slices, as float32.

    No host holds more of a parameter at one time than its own devices do.

    Args:
        files: of the checkpoint.
        family: of the model in it.
        shapes: `ShapeDtypeStruct`s with shardings, as in `Program.state_shape.params`.
        watch: called with the bytes of parameters that are there, and of all.

    Raises:
        UserError: what the files hold is not what the model needs.
    """
    named = flatten(shapes)
    tensors = _refuse_mismatch(files, family, named)
    total = sum(shape.size * shape.dtype.itemsize for shape in named.values())
    arrays, done = {}, 0
    for mapped, names in tensors:
        shape = named[mapped.ours]
        read = functools.partial(_read, files, mapped, names, shape.shape)
        arrays[mapped.ours] = jax.make_array_from_callback(shape.shape, shape.sharding, read)
        # Otherwise the host would run ahead of its devices, and hold what they have not taken yet.
        arrays[mapped.ours].block_until_ready()
        done += shape.size * shape.dtype.itemsize
        watch(done, total)
    return unflatten(arrays, shapes)


def _read(
    files: TensorFiles, mapped: Mapped, names: list[str], shape: tuple[int, ...], index: Index | None
) -> np.ndarray:
    """A slice of one of our parameters, of `shape`, from its tensor or from those of its layers."""
    index = index or (slice(None),) * len(shape)
    if not mapped.is_per_layer:
        return mapped.read(functools.partial(files.read, names[0]), shape, index).astype(np.float32)
    sizes = [len(range(*part.indices(size))) for part, size in zip(index, shape, strict=True)]
    out = np.empty(sizes, np.float32)
    for place, name in enumerate(names[index[0]]):
        out[place] = mapped.read(functools.partial(files.read, name), shape[1:], index[1:])
    return out


def _refuse_mismatch(files: TensorFiles, family: Family, named: dict[str, Any]) -> list[tuple[Mapped, list[str]]]:
    """The tensors of each parameter, if these are all there, of the right shape and dtype, and nothing else is."""
    saved_alone = not any(name.startswith(family.prefix) for name in files.names)
    tensors: list[tuple[Mapped, list[str]]] = []
    needed: dict[str, tuple[int, ...]] = {}
    for mapped in family.tensors_of(named):
        shape = named[mapped.ours].shape
        names = mapped.names(shape[0])
        if saved_alone:
            names = [name.removeprefix(family.prefix) for name in names]
        tensors.append((mapped, names))
        needed |= dict.fromkeys(names, mapped.their_shape(shape[1:] if mapped.is_per_layer else shape))
    for name in (*needed, OUTPUT):
        if name in files.names:
            files.refuse_other_dtype(name)
    surplus = {name for name in files.names - set(needed) if not re.fullmatch(family.buffers, name)}
    if OUTPUT in surplus:
        table = next(names[0] for mapped, names in tensors if mapped.ours == "token_embedding.embedding")
        _refuse_other_output(files, table)
        surplus.remove(OUTPUT)
    missing = set(needed) - files.names
    if missing or surplus:
        raise UserError(
            "the names of the tensors are not those of the model that config.json tells of: "
            + "; ".join(
                [f"it needs {some(missing)}, which no file holds"] * bool(missing)
                + [f"the files hold {some(surplus)}, which it does not have"] * bool(surplus)
            )
            + "; give the files and the config.json of one model"
        )
    for name, shape in needed.items():
        if files.shape(name) != shape:
            raise UserError(
                f"{name} has the shape {files.shape(name)}, and the model that config.json tells of needs {shape}; "
                "give the files and the config.json of one model, and no model.* key"
            )
    return tensors


def _refuse_other_output(files: TensorFiles, table: str) -> None:
    """Raises UserError if the output projection is not the embedding, although it should be."""
    same = files.shape(OUTPUT) == files.shape(table)
    for start in range(0, files.shape(table)[0] if same else 0, ROWS_PER_COMPARISON):
        rows = (slice(start, min(start + ROWS_PER_COMPARISON, files.shape(table)[0])), slice(None))
        same = same and bool((files.read(OUTPUT, rows) == files.read(table, rows)).all())
    if not same:
        raise UserError(
            f"{OUTPUT} differs from {table}, but tie_word_embeddings of config.json says that they are one; set that "
            "to false there if the file is right"
        )
