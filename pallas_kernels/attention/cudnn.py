"""Attention by NVIDIA's cuDNN, as JAX calls it."""

import jax
from jaxtyping import Array, Float

from pallas_kernels.attention.spec import AttentionSpec, SegmentIds


def cudnn_attention(
    query: Float[Array, "batch query_length heads head_dim"],
    key: Float[Array, "batch key_length kv_heads head_dim"],
    value: Float[Array, "batch key_length kv_heads head_dim"],
    segment_ids: SegmentIds,
    spec: AttentionSpec,
) -> Float[Array, "batch query_length heads head_dim"]:
    """See `pallas_kernels.attention.attention`."""
    assert segment_ids is None
    return jax.nn.dot_product_attention(
        query,
        key,
        value,
        scale=spec.scale,
        is_causal=spec.causal,
        local_window_size=None if spec.window is None else (spec.window - 1, 0),
        implementation="cudnn",
    )
