"""How long a program takes on the device at hand."""

import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def random_arrays(shapes: list[jax.ShapeDtypeStruct], seed: int = 0) -> list[jax.Array]:
    """Normal numbers in arrays of those shapes, zeros in those of integers."""
    rng = np.random.default_rng(seed)
    return [
        jnp.zeros(shape.shape, shape.dtype)
        if jnp.issubdtype(shape.dtype, jnp.integer)
        else jnp.asarray(rng.standard_normal(shape.shape, np.float32), shape.dtype)
        for shape in shapes
    ]


def seconds_per_call(function: Callable[..., Any], *arguments: Any, repeats: int = 5, calls: int = 10) -> float:
    """The median over `repeats` of the mean of `calls`, which follow each other without waiting in between."""
    compiled = jax.jit(function).lower(*arguments).compile()
    jax.block_until_ready(compiled(*arguments))
    found = []
    for _ in range(repeats):
        start = time.perf_counter()
        for _ in range(calls):
            result = compiled(*arguments)
        jax.block_until_ready(result)
        found.append((time.perf_counter() - start) / calls)
    return statistics.median(found)
