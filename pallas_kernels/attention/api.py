"""The public attention function and the rule by which `auto` picks an implementation."""

from collections.abc import Callable
from typing import Literal

import jax
from jaxtyping import Array, Float, Int

from pallas_kernels.attention.blocked import BLOCK_SIZE, blocked_attention
from pallas_kernels.attention.reference import reference_attention

Implementation = Literal["auto", "reference", "blocked"]

IMPLEMENTATIONS: dict[str, Callable[..., jax.Array]] = {
    "reference": reference_attention,
    "blocked": blocked_attention,
}


def choose_implementation(*, query_length: int, causal: bool) -> str:
    """Names the implementation that `auto` stands for.

    Both compute the same numbers on every device. `blocked` skips the key blocks that causality hides and
    never holds a whole score matrix, which pays as soon as there is more than one block.
    """
    return "blocked" if causal and query_length > BLOCK_SIZE else "reference"


def attention(
    query: Float[Array, "batch query_length heads head_dim"],
    key: Float[Array, "batch key_length kv_heads head_dim"],
    value: Float[Array, "batch key_length kv_heads value_dim"],
    *,
    query_segment_ids: Int[Array, "batch query_length"] | None = None,
    key_segment_ids: Int[Array, "batch key_length"] | None = None,
    causal: bool = True,
    scale: float | None = None,
    implementation: Implementation = "auto",
) -> Float[Array, "batch query_length heads value_dim"]:
    """Softmax attention with float32 scores (Vaswani et al. 2017, arXiv:1706.03762).

    Args:
        query: queries; `heads` must be a multiple of `kv_heads` (grouped-query attention, arXiv:2305.13245).
        key: keys.
        value: values.
        query_segment_ids: document number of each query; a query sees only keys of its own document.
        key_segment_ids: document number of each key; given together with `query_segment_ids`.
        causal: query `i` sees keys up to `i`; needs equal query and key lengths.
        scale: factor on the scores; `head_dim ** -0.5` when not given.
        implementation: `auto`, or one of `IMPLEMENTATIONS`.

    Returns:
        The attended values, in the dtype of `value`. A query that may see no key gets zeros.

    Raises:
        ValueError: shapes that do not fit together, or an implementation that does not exist.
    """
    heads, kv_heads = query.shape[2], key.shape[2]
    if heads % kv_heads:
        raise ValueError(f"attention: {heads} query heads are no multiple of {kv_heads} key/value heads")
    if causal and query.shape[1] != key.shape[1]:
        raise ValueError(f"attention: causal needs as many queries as keys, got {query.shape[1]}, {key.shape[1]}")
    if (query_segment_ids is None) != (key_segment_ids is None):
        raise ValueError("attention: give query_segment_ids and key_segment_ids together, or neither")
    if implementation == "auto":
        name = choose_implementation(query_length=query.shape[1], causal=causal)
    elif implementation in IMPLEMENTATIONS:
        name = implementation
    else:
        raise ValueError(f"attention: no implementation {implementation!r}; there are {sorted(IMPLEMENTATIONS)}")
    return IMPLEMENTATIONS[name](
        query,
        key,
        value,
        query_segment_ids=query_segment_ids,
        key_segment_ids=key_segment_ids,
        causal=causal,
        scale=query.shape[-1] ** -0.5 if scale is None else scale,
    )
