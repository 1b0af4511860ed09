"""What the functions of this op refuse."""

import jax
import jax.numpy as jnp

MOST_ELEMENTS = 2**31 - 2**16
"""Positions, and those of a last tile that is not full, must be int32."""
MOST_PER_BLOCK = 4096


def check_flat(op: str, name: str, x: jax.Array) -> None:
    """Raises ValueError if `x` is no flat array of float32 or bfloat16, or too large."""
    if x.ndim != 1:
        raise ValueError(f"{op}: {name} has the shape {x.shape}; give a flat array")
    check_elements(op, name, x)


def check_matrix(op: str, name: str, x: jax.Array) -> None:
    """Raises ValueError if `x` is no matrix of float32 or bfloat16, or too large."""
    if x.ndim != 2:
        raise ValueError(f"{op}: {name} has the shape {x.shape}; give a matrix")
    check_elements(op, name, x)


def check_elements(op: str, name: str, x: jax.Array) -> None:
    """Raises ValueError if dtype or size of `x` is none that can be compressed."""
    if x.dtype not in (jnp.float32, jnp.bfloat16):
        raise ValueError(f"{op}: {name} is {x.dtype}; give float32 or bfloat16")
    if not 0 < x.size <= MOST_ELEMENTS:
        raise ValueError(f"{op}: {name} has {x.size} elements; give 1 to {MOST_ELEMENTS}, more of them in parts")


def check_pair(op: str, gradient: jax.Array, residual: jax.Array) -> None:
    """Raises ValueError if these are no flat gradient and float32 residual of equal lengths."""
    check_flat(op, "gradient", gradient)
    if residual.shape != gradient.shape or residual.dtype != jnp.float32:
        raise ValueError(
            f"{op}: residual is {residual.dtype} {residual.shape}; give float32 {gradient.shape}, the gradient's shape"
        )


def check_block_size(op: str, block_size: int) -> None:
    """Raises ValueError if blocks cannot be of this size."""
    if not 0 < block_size <= MOST_PER_BLOCK:
        raise ValueError(f"{op}: block_size {block_size} is out of range; give 1 to {MOST_PER_BLOCK}")


def check_budget(op: str, budget: int, elements: int) -> None:
    """Raises ValueError if there is no room, or more than can be filled."""
    if not 0 < budget <= elements:
        raise ValueError(f"{op}: budget {budget} is out of range; give 1 to {elements}, the number of elements")
