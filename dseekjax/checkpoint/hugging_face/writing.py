"""From parameters on their devices to tensor files."""

import functools
import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from safetensors import SafetensorError
from safetensors.numpy import save_file

from dseekjax.checkpoint.hugging_face.families import Family
from dseekjax.checkpoint.hugging_face.mapping import Mapped
from dseekjax.checkpoint.hugging_face.tensor_files import INDEX, SINGLE
from dseekjax.checkpoint.layout import flatten
from dseekjax.errors import UserError
from dseekjax.files import write_whole
from dseekjax.training.processes import on_first_process


@dataclass(frozen=True)
class _Tensor:
    """One of theirs, and what it is made of."""

    name: str
    parts: tuple[Mapped, ...]
    layer: int | None
    num_bytes: int


def export_parameters(
    params: Any,
    family: Family,
    folder: Path,
    *,
    dtype: str = "float32",
    shard_bytes: int = 5 * 10**9,
    watch: Callable[[int, int], None] = lambda done, total: None,
) -> None:
    """Writes tensor files; no more than one of them is in memory at a time.

    Args:
        params: as in `TrainState`, on any mesh.
        family: to write them as.
        folder: for the files.
        dtype: float32 or bfloat16.
        shard_bytes: largest size of a file; a tensor that is larger has one of its own.
        watch: called with the bytes that are written, and all.

    Raises:
        UserError: they cannot be written.
    """
    named = flatten(params)
    tensors = sorted(
        _tensors(family, named, jnp.dtype(dtype).itemsize),
        key=lambda tensor: -1 if tensor.layer is None else tensor.layer,
    )
    shards = _shards(tensors, shard_bytes)
    total, done = sum(tensor.num_bytes for tensor in tensors), 0
    placed: dict[str, str] = {}
    for i, shard in enumerate(shards):
        file = SINGLE if len(shards) == 1 else f"model-{i + 1:05}-of-{len(shards):05}.safetensors"
        # Every process has a part of each array, and only the first writes.
        arrays = {tensor.name: _gather(tensor, named, dtype) for tensor in shard}
        on_first_process(functools.partial(_save, arrays, folder / file))
        placed |= dict.fromkeys(arrays, file)
        done += sum(tensor.num_bytes for tensor in shard)
        watch(done, total)
    if len(shards) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": placed}
        on_first_process(lambda: write_whole(folder / INDEX, json.dumps(index, indent=2) + "\n"))


def _save(arrays: dict[str, np.ndarray], path: Path) -> None:
    try:
        save_file(arrays, path, {"format": "pt"})
        # It makes files that nobody else may read.
        path.chmod(path.parent.stat().st_mode & 0o666)
    except (OSError, SafetensorError) as error:
        raise UserError(f"cannot write {path.name} ({error}); make room there, or choose another folder") from error


def _tensors(family: Family, named: dict[str, Any], itemsize: int) -> Iterator[_Tensor]:
    """All that the files are to hold."""
    together: dict[str, list[Mapped]] = {}
    for mapped in family.tensors_of(named):
        together.setdefault(mapped.theirs, []).append(mapped)
    for parts in together.values():
        first = parts[0]
        shape = named[first.ours].shape
        whole = first.their_shape(shape[1:] if first.is_per_layer else shape)
        for i, name in enumerate(first.names(shape[0])):
            yield _Tensor(name, tuple(parts), i if first.is_per_layer else None, math.prod(whole) * itemsize)


def _shards(tensors: Sequence[_Tensor], shard_bytes: int) -> list[list[_Tensor]]:
    shards: list[list[_Tensor]] = [[]]
    size = 0
    for tensor in tensors:
        if shards[-1] and size + tensor.num_bytes > shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(tensor)
        size += tensor.num_bytes
    return shards


def _gather(tensor: _Tensor, named: dict[str, Any], dtype: str) -> np.ndarray:
    parts = [part.to_theirs(_fetch(named[part.ours], tensor.layer, dtype)) for part in tensor.parts]
    return np.ascontiguousarray(np.concatenate(parts, axis=-1))


def _fetch(array: jax.Array, layer: int | None, dtype: str) -> np.ndarray:
    """One layer of an array, or all of it, in the memory of every host."""
    replicated = NamedSharding(array.sharding.mesh, PartitionSpec())  # type: ignore[attr-defined]
    whole = _layer_of(array, layer or 0, layer is not None, dtype, replicated)
    return np.asarray(whole)


@functools.partial(jax.jit, static_argnums=(2, 3, 4))
def _layer_of(array: jax.Array, layer: int, is_stacked: bool, dtype: str, sharding: NamedSharding) -> jax.Array:
    part = jax.lax.dynamic_index_in_dim(array, layer, keepdims=False) if is_stacked else array
    return jax.lax.with_sharding_constraint(part.astype(dtype), sharding)
