"""What a language model is fed."""

from dataclasses import dataclass

import jax
from jaxtyping import Array, Float, Int


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Batch:
    """Token sequences, several documents to a row where they are packed."""

    tokens: Int[Array, "batch seq"]
    targets: Int[Array, "batch seq"]
    """The token after each token."""
    loss_weights: Float[Array, "batch seq"]
    """Weight of each target in the loss; 0 where the target belongs to another document or is padding."""
    segment_ids: Int[Array, "batch seq"]
    """Number of the document within the row, from 1; 0 is padding. Attention never crosses it."""
    positions: Int[Array, "batch seq"]
    """Position within the document's part of the row, from 0."""
