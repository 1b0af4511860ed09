"""What arguments of attention must be, whatever computes it."""

import jax
import jax.numpy as jnp

Shaped = jax.Array | jax.ShapeDtypeStruct


def check(
    query: Shaped, key: Shaped, value: Shaped, query_segment_ids: Shaped | None, key_segment_ids: Shaped | None
) -> None:
    """Raises ValueError for shapes and dtypes that do not fit together, see `attention`."""
    for name, x in (("query", query), ("key", key), ("value", value)):
        if len(x.shape) != 4 or 0 in x.shape:
            raise ValueError(f"attention: {name} has shape {x.shape}; give [batch, length, heads, dim], none of them 0")
        if x.dtype != query.dtype or not jnp.issubdtype(x.dtype, jnp.floating):
            raise ValueError(f"attention: {name} is {x.dtype}, query {query.dtype}; cast all to one float dtype")
    (batch, query_length, heads, head_dim), (_, key_length, kv_heads, _) = query.shape, key.shape
    if (key.shape[0], key.shape[3]) != (batch, head_dim) or value.shape[:3] != key.shape[:3]:
        raise ValueError(
            f"attention: query {query.shape}, key {key.shape} and value {value.shape} do not fit together; batch must "
            "be the same in all, head_dim in query and key, key_length and kv_heads in key and value"
        )
    if heads % kv_heads:
        raise ValueError(f"attention: {heads} query heads are no multiple of {kv_heads} key/value heads")
    if (query_segment_ids is None) != (key_segment_ids is None):
        raise ValueError("attention: give query_segment_ids and key_segment_ids together, or neither")
    for name, ids, length in (("query", query_segment_ids, query_length), ("key", key_segment_ids, key_length)):
        if ids is not None and (ids.shape != (batch, length) or not jnp.issubdtype(ids.dtype, jnp.integer)):
            raise ValueError(
                f"attention: {name}_segment_ids are {ids.dtype} of shape {ids.shape}; give integers of shape "
                f"{(batch, length)}"
            )
