"""Cross-entropy of the next token without ever holding all logits, forward or backward."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Shaped

LossSums = tuple[Float[Array, ""], Float[Array, ""]]


def _all_there_is(x: jax.Array) -> jax.Array:
    return x


@dataclass(frozen=True)
class Vocabulary:
    """The part of the vocabulary that logits are of: all of it, or one of several devices' parts."""

    first: Int[Array, ""] | int = 0
    """Number of the first token in the part."""
    largest: Callable[[jax.Array], jax.Array] = _all_there_is
    """Elementwise maximum over the parts."""
    total: Callable[[jax.Array], jax.Array] = _all_there_is
    """Elementwise sum over the parts."""


WHOLE = Vocabulary()


class TargetLogits(NamedTuple):
    """What is known of a chunk's targets."""

    shifted: Float[Array, "chunk vocab"]
    """Logits less the largest of their token."""
    log_normalizer: Float[Array, "chunk"]
    """Logarithm of the sum of their exponentials."""
    label: Float[Array, "chunk"]
    """That of the target; NaN for one that the vocabulary lacks."""
    column: Int[Array, "chunk"]
    """Where that is among `shifted`, if it is there."""


def target_logits(
    x: Float[Array, "chunk embed"],
    kernel: Float[Array, "vocab embed"],
    targets: Int[Array, "chunk"],
    dense: Callable[..., jax.Array],
    vocabulary: Vocabulary,
) -> TargetLogits:
    """The logits of a chunk, and of its targets among them; arguments as of `chunked_cross_entropy`."""
    logits = dense("te,ve->tv", x, kernel, dtype=jnp.float32)
    largest = vocabulary.largest(logits.max(-1))
    shifted = logits - largest[:, None]
    column = targets - vocabulary.first
    here = (column >= 0) & (column < logits.shape[1])
    label = jnp.where(here, jnp.take_along_axis(shifted, column[:, None], axis=1, mode="clip")[:, 0], 0.0)
    # One message for all, where parts are elsewhere.
    normalizer, label, known = vocabulary.total(jnp.stack([jnp.exp(shifted).sum(-1), label, here * 1.0]))
    return TargetLogits(shifted, jnp.log(normalizer), jnp.where(known > 0, label, jnp.nan), column)


def cut_tokens(array: Shaped[Array, "batch seq ..."], chunk: int) -> Shaped[Array, "chunks chunk ..."]:
    """The tokens of all rows in chunks; the last is filled up with zeros."""
    num_tokens = array.shape[0] * array.shape[1]
    rows = array.reshape(num_tokens, *array.shape[2:])
    padded = jnp.pad(rows, ((0, -num_tokens % chunk), *((0, 0) for _ in rows.shape[1:])))
    return padded.reshape(-1, chunk, *rows.shape[1:])


def chunked_cross_entropy(
    x: Float[Array, "batch seq embed"],
    targets: Int[Array, "batch seq"],
    weights: Float[Array, "batch seq"],
    kernel: Float[Array, "vocab embed"],
    chunk: int,
    *,
    dense: Callable[..., jax.Array],
    vocabulary: Vocabulary = WHOLE,
) -> LossSums:
    """Weighted sum of the losses of all targets, and the sum of the weights.

    The gradient is formed in the forward pass, while a chunk's logits are there: the backward pass only scales it by
    the loss's own gradient, so that logits are computed once. A position of weight zero counts for nothing, unless
    its activations are not finite.

    Args:
        x: final activations.
        targets: token to predict at each position; one that the vocabulary lacks makes the loss NaN.
        weights: weight of each position; has no gradient.
        kernel: output projection.
        chunk: tokens whose logits exist at one time.
        dense: as `Operations.dense`.
        vocabulary: the part of the vocabulary that the rows of `kernel` are.

    Returns:
        `(loss_sum, weight_sum)`, both float32.
    """
    num_tokens = targets.size
    chunk = min(chunk, num_tokens)

    def cut(array: jax.Array) -> jax.Array:
        return cut_tokens(array, chunk)

    def chunk_loss(
        x: Float[Array, "chunk embed"],
        kernel: jax.Array,
        targets: Int[Array, "chunk"],
        weights: Float[Array, "chunk"],
    ) -> tuple[Float[Array, ""], Float[Array, "chunk vocab"]]:
        """The summed loss and its gradient by the logits."""
        shifted, log_normalizer, label, column = target_logits(x, kernel, targets, dense, vocabulary)
        # Where, not times: a position that does not count must not turn the sum into NaN.
        counts = weights > 0
        loss = jnp.where(counts, (log_normalizer - label) * weights, 0.0).sum()
        # Exponentials are taken anew, cheaper than to keep an array of them as large as the logits.
        probabilities = jnp.exp(shifted - log_normalizer[:, None])
        is_target = jax.lax.broadcasted_iota(jnp.int32, (1, shifted.shape[1]), 1) == column[:, None]
        slope = jnp.where(counts[:, None], (probabilities - is_target) * weights[:, None], 0.0)
        return loss, slope

    @jax.custom_vjp
    def loss_sum(x: jax.Array, kernel: jax.Array, targets: jax.Array, weights: jax.Array) -> jax.Array:
        def step(total: jax.Array, piece: tuple[jax.Array, ...]) -> tuple[jax.Array, None]:
            x, targets, weights = piece
            return total + chunk_loss(x, kernel, targets, weights)[0], None

        return jax.lax.scan(step, jnp.zeros(()), (cut(x), cut(targets), cut(weights)))[0]

    def forward(
        x: jax.Array, kernel: jax.Array, targets: jax.Array, weights: jax.Array
    ) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        def step(totals: tuple[jax.Array, jax.Array], piece: tuple[jax.Array, ...]) -> tuple[Any, jax.Array]:
            x, targets, weights = piece
            loss, slope = chunk_loss(x, kernel, targets, weights)
            slope = slope.astype(x.dtype)
            # Behind a barrier, or oneDNN would be asked to do the sum as well, in bfloat16 if the product is that.
            of_kernel = jax.lax.optimization_barrier(dense("tv,te->ve", slope, x))
            return (totals[0] + loss, totals[1] + of_kernel), dense("tv,ve->te", slope, kernel)

        start = jnp.zeros(()), jnp.zeros(kernel.shape, jnp.float32)
        (loss, of_kernel), of_x = jax.lax.scan(step, start, (cut(x), cut(targets), cut(weights)))
        return loss, (of_x.reshape(-1, x.shape[-1])[:num_tokens].reshape(x.shape), of_kernel)

    def backward(gradients: tuple[jax.Array, jax.Array], of_loss: jax.Array) -> tuple[Any, ...]:
        of_x, of_kernel = gradients
        of_loss = vocabulary.total(of_loss)
        return (of_x * of_loss).astype(of_x.dtype), (of_kernel * of_loss).astype(kernel.dtype), None, None

    loss_sum.defvjp(forward, backward)
    return loss_sum(x, kernel, targets, weights), weights.sum()
