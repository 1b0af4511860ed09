"""Cross-entropy of the next token without ever holding all logits."""

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

LossSums = tuple[Float[Array, ""], Float[Array, ""]]
Tokens = Float[Array, "..."]


def _all_there_is(log_normalizers: Tokens, labels: Tokens) -> tuple[Tokens, Tokens]:
    return log_normalizers, labels


@dataclass(frozen=True)
class Vocabulary:
    """The part of the vocabulary that logits are of: all of it, or one of several devices' parts."""

    first: Int[Array, ""] | int = 0
    """Number of the first token in the part."""
    unite: Callable[[Tokens, Tokens], tuple[Tokens, Tokens]] = _all_there_is
    """From the part to the whole: logarithms of the sums of exponentiated logits, and the labels' logits."""


def label_logits(
    logits: Float[Array, "batch seq vocab"], targets: Int[Array, "batch seq"], first: Int[Array, ""] | int
) -> Tokens:
    """The logit of each target, zero where it lies in another part than that which begins at token `first`."""
    # By comparison, not by a gather, so that there is nothing to index out of bounds.
    tokens = first + jax.lax.broadcasted_iota(jnp.int32, (1, 1, logits.shape[-1]), 2)
    return jnp.where(tokens == targets[..., None], logits, 0.0).sum(-1)


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
    batch, seq, _ = x.shape
    chunk = min(chunk, seq)

    def cut(x: jax.Array) -> jax.Array:
        padded = jnp.pad(x, ((0, 0), (0, -seq % chunk), *((0, 0) for _ in x.shape[2:])))
        return padded.reshape(batch, -1, chunk, *x.shape[2:]).swapaxes(0, 1)

    # The kernel's gradient is summed over chunks in the dtype of what the loop closes over: float32.
    wide_kernel = kernel.astype(jnp.float32)

    @jax.checkpoint
    def reduce_chunk(x_chunk: jax.Array, target_chunk: jax.Array) -> tuple[jax.Array, jax.Array]:
        logits = project(x_chunk, wide_kernel.astype(kernel.dtype))
        largest = jax.lax.stop_gradient(logits).max(-1)
        log_normalizer = jnp.log(jnp.exp(logits - largest[..., None]).sum(-1)) + largest
        return log_normalizer, label_logits(logits, target_chunk, vocabulary.first)

    _, of_part = jax.lax.scan(lambda _, piece: (None, reduce_chunk(*piece)), None, (cut(x), cut(targets)))
    # Once for all tokens: chunk by chunk, each would wait for a few small messages.
    log_normalizers, labels = vocabulary.unite(*of_part)
    # Where, not times: a position that does not count must not turn the sum into NaN.
    counted = jnp.where(cut(weights) > 0, (log_normalizers - labels) * cut(weights), 0.0)
    return counted.sum(), weights.sum()
