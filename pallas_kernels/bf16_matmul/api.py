"""The public products, and the rule by which `auto` picks an implementation of them."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from pallas_kernels.bf16_matmul.blocks import has_blocks, head_dims
from pallas_kernels.bf16_matmul.grouped import pallas_grouped_matmul
from pallas_kernels.bf16_matmul.matmul import pallas_matmul, pallas_swiglu
from pallas_kernels.bf16_matmul.reference import (
    ACTIVATIONS,
    reference_grouped_matmul,
    reference_matmul,
    reference_qkv_rotary,
    reference_swiglu,
)
from pallas_kernels.bf16_matmul.rotary import pallas_qkv_rotary
from pallas_kernels.dispatch import Device, Implementation, choose, device_at_hand, only_by_name

type Name = Literal["auto", "reference", "pallas", "pallas_interpreted"]

GROUPS_THAT_PAY = 4
"""From so many groups on, `auto` takes the grouped kernel: the reference has as many times its FLOPs."""


@dataclass(frozen=True)
class MatmulCase:
    """What a choice of implementation depends on."""

    op: str
    dtype: str
    shape: tuple[int, ...]
    """Rows, inner, cols."""
    groups: int = 1
    head_dim: int | None = None

    def __str__(self) -> str:
        words = [f"{self.dtype} of {' x '.join(map(str, self.shape))}"]
        words += [f"{self.groups} groups"] * (self.groups > 1)
        words += [f"heads of {self.head_dim}"] * (self.head_dim is not None)
        return ", ".join(words)


def _cannot_interpret(case: MatmulCase, device: Device) -> list[str]:
    reasons = []
    if case.dtype not in ("bfloat16", "float16", "float32"):
        reasons.append(f"kernels multiply bfloat16, float16 and float32, not {case.dtype}")
    if 0 in (*case.shape, case.groups):
        reasons.append("an array is empty")
    if case.head_dim is not None and (case.head_dim < 32 or case.head_dim & (case.head_dim - 1)):
        reasons.append(f"head_dim {case.head_dim} is no power of two from 32 on")
    return reasons


def _cannot_compile(case: MatmulCase, device: Device) -> list[str]:
    reasons = _cannot_interpret(case, device)
    if device.platform != "gpu":
        return [*reasons, "kernels are for GPUs; pallas_interpreted runs anywhere, slowly"]
    if device.gpu is None or not has_blocks(device.gpu.name):
        return [*reasons, "no block sizes are known for this kind of GPU"]
    if case.dtype == "float32":
        reasons.append("tensor cores would round float32 operands to TF32; cast them to bfloat16")
    if case.head_dim is not None and case.head_dim not in head_dims(device.gpu.name):
        reasons.append(f"no block sizes are known for head_dim {case.head_dim}")
    return reasons


def _implementations(
    reference: Callable[..., Any],
    pallas: Callable[..., Any],
    passed_over: Callable[[MatmulCase, Device], str | None],
) -> tuple[Implementation[MatmulCase], ...]:
    def compiled(*arguments: Any, **options: Any) -> Any:
        gpu = device_at_hand().gpu
        assert gpu
        return pallas(gpu.name, *arguments, **options)

    return (
        Implementation("pallas", compiled, _cannot_compile, passed_over),
        Implementation("reference", reference, lambda case, device: []),
        Implementation(
            "pallas_interpreted",
            functools.partial(pallas, None),
            _cannot_interpret,
            passed_over=only_by_name("interprets kernels, for tests"),
        ),
    )


def _few_groups(case: MatmulCase, device: Device) -> str | None:
    return f"{case.groups} groups are too few for it to pay" if case.groups < GROUPS_THAT_PAY else None


_UNMEASURED = only_by_name("XLA has products of its own, and no measurement says that this kernel is faster")

IMPLEMENTATIONS = {
    "matmul": _implementations(reference_matmul, pallas_matmul, _UNMEASURED),
    "swiglu": _implementations(reference_swiglu, pallas_swiglu, _UNMEASURED),
    "grouped_matmul": _implementations(reference_grouped_matmul, pallas_grouped_matmul, _few_groups),
    "qkv_rotary": _implementations(reference_qkv_rotary, pallas_qkv_rotary, _UNMEASURED),
}
"""Of each op, in order of preference."""

EXAMPLES = (
    MatmulCase("matmul", "bfloat16", (8192, 4096, 8192)),
    MatmulCase("swiglu", "bfloat16", (8192, 4096, 8192)),
    MatmulCase("grouped_matmul", "bfloat16", (8192, 4096, 2048), groups=32),
    MatmulCase("qkv_rotary", "bfloat16", (8192, 4096, 6144), head_dim=128),
)
"""Cases by which the choice is shown."""


def matmul(
    x: Float[Array, "rows inner"],
    w: Float[Array, "inner cols"],
    *,
    bias: Float[Array, "cols"] | None = None,
    activation: Literal["gelu", "relu", "silu"] | None = None,
    residual: Float[Array, "rows cols"] | None = None,
    out_dtype: DTypeLike | None = None,
    implementation: Name = "auto",
) -> Float[Array, "rows cols"]:
    """`activation(x @ w + bias) + residual`, summed and finished in float32, then cast once.

    `auto` is `reference` everywhere: XLA's own products, which fuse the epilogue where it can, until a measurement says
    that the kernel is faster. Kept for the backward pass by the kernel: `x`, `w` and `bias`; the sums under an
    activation are computed again. Gradients of sums are rounded to the dtype of `x`.

    Args:
        x: bfloat16 or float16 for the GPU's kernel, any float dtype for `reference`.
        w: of the same dtype.
        bias: of any float dtype.
        activation: gelu is its tanh form (arXiv:1606.08415).
        residual: of any float dtype.
        out_dtype: of the result; that of `x` when not given.
        implementation: `auto`, or the name of one of `IMPLEMENTATIONS`.

    Raises:
        ValueError: shapes or dtypes that do not fit together, or an implementation that cannot compute this here.
    """
    _check_product("matmul", x, w)
    _check_shape("matmul", "bias", bias, w.shape[1:])
    _check_shape("matmul", "residual", residual, (x.shape[0], w.shape[1]))
    if activation is not None and activation not in ACTIVATIONS:
        raise ValueError(f"matmul: no activation {activation!r}; there are {', '.join(sorted(ACTIVATIONS))}")
    case = MatmulCase("matmul", x.dtype.name, (*x.shape, w.shape[1]))
    out_dtype = x.dtype if out_dtype is None else jnp.dtype(out_dtype)
    for name, dtype in (("out_dtype", out_dtype), ("bias", bias), ("residual", residual)):
        if dtype is not None and not jnp.issubdtype(getattr(dtype, "dtype", dtype), jnp.floating):
            raise ValueError(f"matmul: {name} is {getattr(dtype, 'dtype', dtype)}; give a float dtype")
    run = _chosen(case, implementation)
    out: jax.Array = run(x, w, bias, residual, activation=activation, out_dtype=out_dtype)
    return out


def swiglu(
    x: Float[Array, "rows inner"],
    w_gate: Float[Array, "inner cols"],
    w_up: Float[Array, "inner cols"],
    *,
    implementation: Name = "auto",
) -> Float[Array, "rows cols"]:
    """`silu(x @ w_gate) * (x @ w_up)` (Shazeer 2020, arXiv:2002.05202), finished in float32, then cast to `x`'s dtype.

    The kernel reads `x` once for both products. `auto` is `reference`, as for `matmul`. Kept for the backward pass by
    the kernel: what is given; both products are computed again.

    Args:
        x: bfloat16 or float16 for the GPU's kernel, any float dtype for `reference`.
        w_gate: of the same dtype.
        w_up: likewise.
        implementation: `auto`, or the name of one of `IMPLEMENTATIONS`.

    Raises:
        ValueError: shapes or dtypes that do not fit together, or an implementation that cannot compute this here.
    """
    _check_product("swiglu", x, w_gate)
    _check_product("swiglu", x, w_up)
    _check_shape("swiglu", "w_up", w_up, w_gate.shape)
    case = MatmulCase("swiglu", x.dtype.name, (*x.shape, w_gate.shape[1]))
    out: jax.Array = _chosen(case, implementation)(x, w_gate, w_up)
    return out


def grouped_matmul(
    x: Float[Array, "rows inner"],
    w: Float[Array, "groups inner cols"],
    group_sizes: Int[Array, "groups"],
    *,
    implementation: Name = "auto",
) -> Float[Array, "rows cols"]:
    """Rows of each group times the group's matrix, as of experts; in float32, then cast to the dtype of `x`.

    `auto` is `pallas` on a GPU that it knows, from `GROUPS_THAT_PAY` groups on, else `reference`. The kernel has
    `2 * rows * inner * cols` FLOPs, and for each group those of at most one block of rows more; the reference has
    `groups` times as many and moves `x` and the result `groups` times. So the kernel wins if it reaches that fraction
    of the speed of XLA's products; this is counted, not measured. Kept for the backward pass by the kernel: what is
    given.

    Args:
        x: rows sorted by group; bfloat16 or float16 for the GPU's kernel, any float dtype for `reference`.
        w: of the same dtype.
        group_sizes: how many rows each group has, 0 or more; known only when it runs. Rows beyond their sum get zeros.
            A sum above `rows` is an error that cannot be seen: the last groups then lack rows.
        implementation: `auto`, or the name of one of `IMPLEMENTATIONS`.

    Raises:
        ValueError: shapes or dtypes that do not fit together, or an implementation that cannot compute this here.
    """
    if w.ndim != 3:
        raise ValueError(f"grouped_matmul: w has shape {w.shape}; it must be (groups, inner, cols)")
    _check_product("grouped_matmul", x, jax.ShapeDtypeStruct(w.shape[1:], w.dtype))
    _check_shape("grouped_matmul", "group_sizes", group_sizes, w.shape[:1])
    if not jnp.issubdtype(group_sizes.dtype, jnp.integer):
        raise ValueError(f"grouped_matmul: group_sizes are {group_sizes.dtype}; they must be integers")
    # Narrow integers would not hold their sum.
    group_sizes = group_sizes.astype(jnp.int32)
    case = MatmulCase("grouped_matmul", x.dtype.name, (*x.shape, w.shape[2]), groups=w.shape[0])
    out: jax.Array = _chosen(case, implementation)(x, w, group_sizes)
    return out


def qkv_rotary(
    x: Float[Array, "batch seq embed"],
    w_qkv: Float[Array, "embed all_heads_times_head_dim"],
    positions: Int[Array, "batch seq"],
    *,
    num_heads: int,
    num_kv_heads: int,
    theta: float = 10000.0,
    implementation: Name = "auto",
) -> tuple[
    Float[Array, "batch seq heads head_dim"],
    Float[Array, "batch seq kv_heads head_dim"],
    Float[Array, "batch seq kv_heads head_dim"],
]:
    """Queries, keys and values from one product, with rotary position embedding before they are cast.

    Each pair (i, i + head_dim/2) of queries and keys turns by its position times theta^(-2i/head_dim) (Su et al. 2021,
    arXiv:2104.09864, with the halves paired as in the Llama checkpoints). `auto` is `reference`, as for `matmul`. Kept
    for the backward pass by the kernel: what is given; nothing is computed again.

    Args:
        x: bfloat16 or float16 for the GPU's kernel, any float dtype for `reference`.
        w_qkv: columns of the heads of queries, then of keys, then of values; of the dtype of `x`.
        positions: of each token in its document.
        num_heads: of queries.
        num_kv_heads: of keys, and of values (grouped-query attention, arXiv:2305.13245).
        theta: the base of the angles.
        implementation: `auto`, or the name of one of `IMPLEMENTATIONS`; the kernel needs head_dim to be a power of two.

    Raises:
        ValueError: shapes or dtypes that do not fit together, or an implementation that cannot compute this here.
    """
    if x.ndim != 3:
        raise ValueError(f"qkv_rotary: x has shape {x.shape}; it must be (batch, seq, embed)")
    rows = x.reshape(-1, x.shape[2])
    _check_product("qkv_rotary", rows, w_qkv)
    _check_shape("qkv_rotary", "positions", positions, x.shape[:2])
    if num_heads < 1 or num_kv_heads < 1:
        raise ValueError(f"qkv_rotary: {num_heads} heads and {num_kv_heads} for keys; each must be 1 or more")
    if not jnp.issubdtype(positions.dtype, jnp.integer):
        raise ValueError(f"qkv_rotary: positions are {positions.dtype}; they must be integers")
    all_heads = num_heads + 2 * num_kv_heads
    if w_qkv.shape[1] % (2 * all_heads):
        raise ValueError(
            f"qkv_rotary: w_qkv has {w_qkv.shape[1]} columns; {num_heads} + 2 * {num_kv_heads} heads of an even "
            f"head_dim need a multiple of {2 * all_heads}"
        )
    head_dim = w_qkv.shape[1] // all_heads
    case = MatmulCase("qkv_rotary", x.dtype.name, (*rows.shape, w_qkv.shape[1]), head_dim=head_dim)
    run = _chosen(case, implementation)
    query, key, value = run(rows, w_qkv, positions.reshape(-1), theta, num_heads, num_kv_heads)
    query, key, value = (y.reshape(*x.shape[:2], -1, head_dim) for y in (query, key, value))
    return query, key, value


def _chosen(case: MatmulCase, implementation: str) -> Callable[..., Any]:
    return choose(case.op, IMPLEMENTATIONS[case.op], implementation, case, device_at_hand()).run


def _check_product(op: str, x: jax.Array, w: jax.Array | jax.ShapeDtypeStruct) -> None:
    if x.ndim != 2 or w.ndim != 2 or x.shape[1] != w.shape[0]:
        raise ValueError(f"{op}: shapes {x.shape} and {w.shape} do not multiply; give (rows, inner) and (inner, cols)")
    if x.dtype != w.dtype or not jnp.issubdtype(x.dtype, jnp.floating):
        raise ValueError(f"{op}: operands are {x.dtype} and {w.dtype}; cast them to one float dtype")


def _check_shape(op: str, name: str, x: jax.Array | None, shape: tuple[int, ...]) -> None:
    if x is not None and x.shape != shape:
        raise ValueError(f"{op}: {name} has shape {x.shape}; it must be {shape}")
