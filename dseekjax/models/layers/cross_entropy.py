"""Cross-entropy of the next token without ever holding all logits."""

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

LossSums = tuple[Float[Array, ""], Float[Array, ""]]


def _same(x: jax.Array) -> jax.Array:
    return x


@dataclass(frozen=True)
class Vocabulary:
    """The part of the vocabulary that logits are of: all of it, or one of several devices' parts."""

    first: Int[Array, ""] | int = 0
    """Number of the first token in the part."""
    largest: Callable[[jax.Array], jax.Array] = _same
    """The maximum over all parts."""
    total: Callable[[jax.Array], jax.Array] = _same
    """The sum over all parts."""


def token_cross_entropy(
    logits: Float[Array, "batch seq vocab"], targets: Int[Array, "batch seq"], vocabulary: Vocabulary = Vocabulary()
) -> Float[Array, "batch seq"]:
    """Negative log-likelihood, in nats, of each target under float32 `logits`.

    The label's logit is taken by comparison, not by a gather, so that one that lies in another part counts nothing.
    """
    tokens = vocabulary.first + jax.lax.broadcasted_iota(jnp.int32, (1, 1, logits.shape[-1]), 2)
    label = jnp.where(tokens == targets[..., None], logits, 0.0).sum(-1)
    largest = vocabulary.largest(jax.lax.stop_gradient(logits).max(-1))
    exponentials = jnp.exp(logits - largest[..., None]).sum(-1)
    exponentials, label = vocabulary.total(jnp.stack([exponentials, label]))
    return jnp.log(exponentials) + largest - label


def chunked_cross_entropy(
    x: Float[Array, "batch seq embed"],
    targets: Int[Array, "batch seq"],
    weights: Float[Array, "batch seq"],
    kernel: Float[Array, "vocab embed"],
    chunk: int,
    *,
    project: Callable[[jax.Array, jax.Array], jax.Array],
    vocabulary: Vocabulary = Vocabulary(),
) -> LossSums:
    """Weighted sum of the losses of all targets, and the sum of the weights.

    Args:
        x: final activations.
        targets: token to predict at each position.
        weights: weight of each position.
        kernel: output projection.
        chunk: positions of the sequence per chunk; logits exist for one chunk at a time, forward and backward.
        project: `(x, kernel) -> float32 logits`.
        vocabulary: the part of the vocabulary that the rows of `kernel` are.

    Returns:
        `(loss_sum, weight_sum)`, both float32.
    """
    batch, seq, embed = x.shape
    chunk = min(chunk, seq)
    padding = -seq % chunk
    if padding:
        x = jnp.pad(x, ((0, 0), (0, padding), (0, 0)))
        targets = jnp.pad(targets, ((0, 0), (0, padding)))
        weights = jnp.pad(weights, ((0, 0), (0, padding)))
    chunks = (seq + padding) // chunk
    pieces = (
        x.reshape(batch, chunks, chunk, embed).swapaxes(0, 1),
        targets.reshape(batch, chunks, chunk).swapaxes(0, 1),
        weights.reshape(batch, chunks, chunk).swapaxes(0, 1),
    )
    # The kernel's gradient is summed over chunks in the dtype of what the loop closes over: float32.
    wide_kernel = kernel.astype(jnp.float32)

    @jax.checkpoint
    def add_chunk(loss_sum: jax.Array, piece: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, None]:
        x_chunk, target_chunk, weight_chunk = piece
        logits = project(x_chunk, wide_kernel.astype(kernel.dtype))
        losses = token_cross_entropy(logits, target_chunk, vocabulary)
        # Where, not times: a position that does not count must not turn the sum into NaN.
        return loss_sum + jnp.where(weight_chunk > 0, losses * weight_chunk, 0.0).sum(), None

    loss_sum, _ = jax.lax.scan(add_chunk, jnp.zeros((), jnp.float32), pieces)
    return loss_sum, weights.sum()
