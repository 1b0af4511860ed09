"""How likely each target is, without ever holding all logits."""

from collections.abc import Callable
from dataclasses import dataclass

import jax
from jaxtyping import Array, Bool, Float, Int

from dseekjax.models.layers.cross_entropy import WHOLE, Vocabulary, cut_tokens, target_logits


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TargetScores:
    """What a model thinks of each target."""

    log_probabilities: Float[Array, "batch seq"]
    """In nats, float32."""
    are_greedy: Bool[Array, "batch seq"]
    """Whether no token is more likely than the target."""


def chunked_target_scores(
    x: Float[Array, "batch seq embed"],
    targets: Int[Array, "batch seq"],
    kernel: Float[Array, "vocab embed"],
    chunk: int,
    *,
    dense: Callable[..., jax.Array],
    vocabulary: Vocabulary = WHOLE,
) -> TargetScores:
    """The scores of all targets, also of those that do not count in a loss.

    Args:
        x: final activations.
        targets: token to score at each position; one that the vocabulary lacks has the log-probability NaN.
        kernel: output projection.
        chunk: tokens whose logits exist at one time.
        dense: as `Operations.dense`.
        vocabulary: the part of the vocabulary that the rows of `kernel` are.
    """
    chunk = min(chunk, targets.size)

    def score(piece: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        x, targets = piece
        found = target_logits(x, kernel, targets, dense, vocabulary)
        return found.label - found.log_normalizer, found.label == 0

    scores = jax.lax.map(score, (cut_tokens(x, chunk), cut_tokens(targets, chunk)))
    return TargetScores(*(part.reshape(-1)[: targets.size].reshape(targets.shape) for part in scores))
