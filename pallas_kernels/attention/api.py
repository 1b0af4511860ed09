"""The public attention functions."""

import math
from typing import Literal, cast

import jax
import numpy as np
from jaxtyping import Array, Float, Int

from pallas_kernels.attention.checks import check
from pallas_kernels.attention.implementations import IMPLEMENTATIONS, WITH_LOG_SUM_EXP, AttentionCase
from pallas_kernels.attention.spec import AttentionSpec
from pallas_kernels.dispatch import Device, choose, device_at_hand

ImplementationName = Literal["auto", "reference", "blocked", "cudnn", "pallas", "pallas_interpreted"]


def attention(
    query: Float[Array, "batch query_length heads head_dim"],
    key: Float[Array, "batch key_length kv_heads head_dim"],
    value: Float[Array, "batch key_length kv_heads value_dim"],
    *,
    query_segment_ids: Int[Array, "batch query_length"] | None = None,
    key_segment_ids: Int[Array, "batch key_length"] | None = None,
    causal: bool = True,
    window: int | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    implementation: ImplementationName = "auto",
) -> Float[Array, "batch query_length heads value_dim"]:
    """Softmax attention with float32 scores (Vaswani et al. 2017, arXiv:1706.03762).

    Args:
        query: queries; `heads` must be a multiple of `kv_heads` (grouped-query attention, arXiv:2305.13245).
        key: keys.
        value: values; their heads may have another size (multi-head latent attention, arXiv:2405.04434).
        query_segment_ids: document number of each query; a query sees only keys of its own document.
        key_segment_ids: document number of each key; given together with `query_segment_ids`.
        causal: query `i` sees keys up to `i`; needs equal query and key lengths.
        window: a query sees keys less than this far away, itself at 0 (sliding window, arXiv:2004.05150).
        scale: factor on the scores; `head_dim ** -0.5` when not given.
        softcap: scores become `softcap * tanh(score / softcap)` (Gemma 2, arXiv:2408.00118).
        implementation: one by name, or `auto` for the first of `IMPLEMENTATIONS` that takes these arguments on the
            device at hand and is not passed over there. All compute the same numbers, to the rounding of the dtype; in
            float32 on a GPU, `reference` and `blocked` to that of TF32, unless JAX's matmul precision says otherwise.

    Returns:
        The attended values, in the dtype of the arguments. A query that may see no key gets zeros. Infinity or NaN in
        a value may reach queries that do not see it, in the same sequence: a weight of 0 times it is NaN.

    Raises:
        ValueError: arguments that do not fit together, or an implementation that does not exist or cannot run here.
    """
    case, spec = describe(query, key, value, query_segment_ids, key_segment_ids, causal, window, scale, softcap)
    chosen = choose("attention", IMPLEMENTATIONS, implementation, case, device_at_hand())
    out: jax.Array = chosen.run(query, key, value, _pair(query_segment_ids, key_segment_ids), spec)
    return out


def attention_with_log_sum_exp(
    query: Float[Array, "batch query_length heads head_dim"],
    key: Float[Array, "batch key_length kv_heads head_dim"],
    value: Float[Array, "batch key_length kv_heads value_dim"],
    *,
    query_segment_ids: Int[Array, "batch query_length"] | None = None,
    key_segment_ids: Int[Array, "batch key_length"] | None = None,
    causal: bool = True,
    window: int | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    implementation: Literal["auto", "reference", "pallas", "pallas_interpreted"] = "auto",
) -> tuple[Float[Array, "batch query_length heads value_dim"], Float[Array, "batch query_length heads"]]:
    """Attention, and the logarithm of the sum of the exponentials of each query's scores, both differentiable.

    Attention over all keys is put together from that over parts of them by these logarithms (Rabe and Staats 2021,
    arXiv:2112.05682).

    Returns:
        What `attention` gives for these arguments, and the logarithms in float32; -inf for a query that sees no key.

    Raises:
        ValueError: as `attention` does.
    """
    case, spec = describe(query, key, value, query_segment_ids, key_segment_ids, causal, window, scale, softcap)
    chosen = choose("attention_with_log_sum_exp", WITH_LOG_SUM_EXP, implementation, case, device_at_hand())
    out, log_sum_exp = chosen.run(query, key, value, _pair(query_segment_ids, key_segment_ids), spec)
    return out, log_sum_exp


def choose_implementation(case: AttentionCase, device: Device, implementation: str = "auto") -> ImplementationName:
    """Names what `implementation` stands for.

    Raises:
        ValueError: it does not exist or cannot compute this case on this device.
    """
    return cast(ImplementationName, choose("attention", IMPLEMENTATIONS, implementation, case, device).name)


def describe(
    query: jax.Array | jax.ShapeDtypeStruct,
    key: jax.Array | jax.ShapeDtypeStruct,
    value: jax.Array | jax.ShapeDtypeStruct,
    query_segment_ids: jax.Array | None = None,
    key_segment_ids: jax.Array | None = None,
    causal: bool = True,
    window: int | None = None,
    scale: float | None = None,
    softcap: float | None = None,
) -> tuple[AttentionCase, AttentionSpec]:
    """What `attention` is asked for, as data.

    Raises:
        ValueError: arguments that do not fit together.
    """
    check(query, key, value, query_segment_ids, key_segment_ids)
    (_, query_length, _, head_dim), key_length = query.shape, key.shape[1]
    if causal and query_length != key_length:
        raise ValueError(f"attention: causal needs as many queries as keys, got {query_length}, {key_length}")
    if window is not None:
        if not isinstance(window, (int, np.integer)) or window < 1:
            raise ValueError(f"attention: window {window} must be a positive int, or None for no window")
        # A wider one hides nothing, and positions of its edge need not fit into integers.
        window = window if window < max(query_length, key_length) else None
    for name, number in (("scale", scale), ("softcap", softcap)):
        if number is not None and not (isinstance(number, (int, float, np.floating)) and math.isfinite(number)):
            raise ValueError(f"attention: {name} must be a finite Python number, known when traced, got {number}")
    if softcap is not None and softcap <= 0:
        raise ValueError(f"attention: softcap {softcap} must be positive, or None for none")
    spec = AttentionSpec(causal, window, head_dim**-0.5 if scale is None else scale, softcap)
    case = AttentionCase(
        query.dtype.name, query_length, key_length, head_dim, value.shape[-1], query_segment_ids is not None, spec
    )
    return case, spec


def _pair(queries: jax.Array | None, keys: jax.Array | None) -> tuple[jax.Array, jax.Array] | None:
    return None if queries is None or keys is None else (queries, keys)
