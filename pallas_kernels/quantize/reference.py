"""Compression of gradients in plain JAX; the definition of what the kernels compute."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.quantize import arithmetic
from pallas_kernels.quantize.formats import Int8Blocks, Signs, Sparse, TwoOfFour


def in_blocks(x: Array, size: int) -> Array:
    """A flat array in rows of `size`, the last filled up with zeros."""
    return jnp.pad(x, (0, -x.size % size)).reshape(-1, size)


def reference_quantize_int8(x: Float[Array, "elements"], key_words: Array | None, *, block_size: int) -> Int8Blocks:
    """See `pallas_kernels.quantize.quantize_int8`."""
    blocks = in_blocks(x.astype(jnp.float32), block_size)
    largest = arithmetic.magnitude_bits(blocks).max(1)
    scale = arithmetic.integer_scale(largest)
    fraction: Array | float = 0.5
    if key_words is not None:
        index = jnp.arange(blocks.size, dtype=jnp.uint32).reshape(blocks.shape)
        fraction = arithmetic.random_fraction(key_words[0], key_words[1], index)
    usable = jnp.where(arithmetic.is_usable(largest)[:, None], blocks, 0.0)
    integers = arithmetic.round_to_scale(usable, scale[:, None], fraction).astype(jnp.int8)
    return Int8Blocks(integers.reshape(-1)[: x.size], arithmetic.marked(scale, largest), block_size)


def reference_compress_signs(
    gradient: Float[Array, "elements"], residual: Float[Array, "elements"], *, block_size: int
) -> tuple[Signs, Float[Array, "elements"]]:
    """See `pallas_kernels.quantize.compress_signs`."""
    elements = gradient.size
    corrected = in_blocks(gradient.astype(jnp.float32) + residual, block_size)
    largest = arithmetic.magnitude_bits(corrected).max(1)
    usable = jnp.where(arithmetic.is_usable(largest)[:, None], corrected, 0.0)
    counts = jnp.clip(elements - block_size * jnp.arange(len(corrected)), 1, block_size).astype(jnp.int32)
    scale = arithmetic.marked(arithmetic.mean_magnitude(usable, counts, largest), largest)
    negative = corrected < 0.0
    left = corrected - jnp.where(negative, -scale[:, None], scale[:, None])
    left = jnp.where(arithmetic.is_nonfinite(largest)[:, None], in_blocks(residual, block_size), left)
    bits = in_blocks(negative.reshape(-1)[:elements], 32).astype(jnp.uint32)
    words = (bits << jnp.arange(32, dtype=jnp.uint32)).sum(1, dtype=jnp.uint32)
    return Signs(words, scale, elements, block_size), left.reshape(-1)[:elements]


def reference_sparsify(
    gradient: Float[Array, "elements"],
    residual: Float[Array, "elements"],
    threshold: Float[Array, ""],
    *,
    budget: int,
) -> tuple[Sparse, Float[Array, "elements"]]:
    """See `pallas_kernels.quantize.sparsify`."""
    corrected = gradient.astype(jnp.float32) + residual
    bits = arithmetic.magnitude_bits(corrected)
    passes = bits >= passing_bits(threshold)
    slots = jnp.cumsum(passes, dtype=jnp.int32) - 1
    taken = passes & (slots < budget)
    where = jnp.where(taken, slots, budget)
    indices = jnp.arange(gradient.size, dtype=jnp.int32)
    none = jnp.full((budget,), gradient.size, jnp.int32)
    sparse = Sparse(
        none.at[where].set(indices, mode="drop"),
        jnp.zeros((budget,), jnp.float32).at[where].set(corrected, mode="drop"),
        gradient.size,
    )
    return _settle(sparse, jnp.where(taken, 0.0, corrected), residual, arithmetic.is_nonfinite(bits).any())


def reference_sparsify_top_k(
    gradient: Float[Array, "elements"], residual: Float[Array, "elements"], *, budget: int
) -> tuple[Sparse, Float[Array, "elements"]]:
    """See `pallas_kernels.quantize.sparsify_top_k`."""
    corrected = gradient.astype(jnp.float32) + residual
    bits = arithmetic.magnitude_bits(corrected)
    indices = jnp.sort(jax.lax.top_k(bits, budget)[1]).astype(jnp.int32)
    sparse = Sparse(indices, corrected[indices], gradient.size)
    return _settle(sparse, corrected.at[indices].set(0.0), residual, arithmetic.is_nonfinite(bits).any())


def passing_bits(threshold: Float[Array, ""]) -> Array:
    """Bits of the smallest magnitude that passes; what counts as zero never does."""
    return jnp.maximum(arithmetic.magnitude_bits(threshold), arithmetic.SMALLEST_BITS)


def _settle(sparse: Sparse, left: Array, residual: Array, nonfinite: Array) -> tuple[Sparse, Array]:
    """Marks values and gives the old residual back if anything was not finite."""
    used = sparse.indices < sparse.elements
    values = jnp.where(used & nonfinite, jnp.nan, sparse.values)
    return Sparse(sparse.indices, values, sparse.elements), jnp.where(nonfinite, residual, left)


def reference_prune_two_of_four(x: Float[Array, "rows columns"]) -> TwoOfFour:
    """See `pallas_kernels.quantize.prune_two_of_four`."""
    rows, columns = x.shape
    tiled = jnp.pad(x.astype(jnp.float32), ((0, -rows % 8), (0, -columns % 8)))
    fours = tiled.reshape(tiled.shape[0] // 8, 8, tiled.shape[1] // 8, 2, 4)
    largest = arithmetic.magnitude_bits(fours).max((1, 3, 4))
    values, places = packed_two_of_four([fours[..., i] for i in range(4)], largest[:, None, :, None])
    scale = arithmetic.marked(arithmetic.integer_scale(largest), largest)
    shape = (tiled.shape[0], tiled.shape[1] // 8)
    return TwoOfFour(
        values.sum(-1).astype(jnp.uint32).reshape(shape),
        places.sum(-1).astype(jnp.uint8).reshape(shape),
        scale,
        rows,
        columns,
    )


def packed_two_of_four(
    four: list[Float[Array, "*shape 2"]], largest: Int[Array, "*#shape 1"]
) -> tuple[Int[Array, "*shape 2"], Int[Array, "*shape 2"]]:
    """Halves of the words and of the places of `TwoOfFour`, whose sums they are.

    Of equals the first is kept. What is not finite is larger than what is.

    Args:
        four: the first, second, third and fourth of each four; twos of fours are side by side in a row.
        largest: bits of the largest magnitude of each one's tile.
    """
    bits = [arithmetic.magnitude_bits(x) for x in four]

    def keeps(i: int) -> Array:
        ahead = [bits[j] >= bits[i] if j < i else bits[j] > bits[i] for j in range(4) if j != i]
        return sum((x.astype(jnp.int32) for x in ahead), jnp.int32(0)) < 2

    first, second, third, fourth = (keeps(i) for i in range(4))
    low = jnp.where(first, four[0], jnp.where(second, four[1], four[2]))
    high = jnp.where(fourth, four[3], jnp.where(third, four[2], four[1]))
    low_place = jnp.where(first, 0, jnp.where(second, 1, 2))
    high_place = jnp.where(fourth, 3, jnp.where(third, 2, 1))

    scale, usable = arithmetic.integer_scale(largest), arithmetic.is_usable(largest)
    low, high = (arithmetic.round_to_scale(jnp.where(usable, x, 0.0), scale, 0.5) for x in (low, high))
    half = jax.lax.broadcasted_iota(jnp.int32, low.shape, low.ndim - 1)
    return (low & 255 | (high & 255) << 8) << (16 * half), (low_place | high_place << 2) << (4 * half)
