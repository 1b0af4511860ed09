"""Loss, perplexity and bits per byte of texts."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from dseekjax.data.assembly import evaluation_batches
from dseekjax.data.config import DataConfig
from dseekjax.data.corpus import Portion
from dseekjax.errors import UserError
from dseekjax.evaluation.scorer import Scorer, Watch, nobody


def perplexity(loss: float) -> float:
    """Of a loss in nats per token; infinite where that is more than a float can say."""
    return math.exp(loss) if loss < 700 else math.inf


@dataclass(frozen=True)
class SourceLoss:
    """What a model makes of a text."""

    name: str
    loss_sum: float
    """Nats, over all targets."""
    num_targets: int
    """Tokens that were predicted: not the first of a document, nor what was left out."""
    num_tokens: int
    """Of the text that counts, the end of each document included."""
    num_bytes: int
    """Of the same text."""
    predicted_bytes: float
    """That the targets stand for, by the mean length of the text's tokens."""

    @property
    def loss(self) -> float:
        """Nats per token."""
        return self.loss_sum / self.num_targets

    @property
    def perplexity(self) -> float:
        """Per token."""
        return perplexity(self.loss)

    @property
    def bits_per_byte(self) -> float:
        """Of what was predicted."""
        return self.loss_sum / math.log(2) / self.predicted_bytes


def total(losses: Sequence[SourceLoss]) -> SourceLoss:
    """Of several texts together, each with the weight of what was predicted of it."""
    return SourceLoss(
        "all",
        sum(loss.loss_sum for loss in losses),
        sum(loss.num_targets for loss in losses),
        sum(loss.num_tokens for loss in losses),
        sum(loss.num_bytes for loss in losses),
        sum(loss.predicted_bytes for loss in losses),
    )


def source_loss(
    scorer: Scorer,
    portion: Portion,
    config: DataConfig,
    *,
    max_batches: int | None = None,
    tell: Callable[[str], None] = lambda sentence: None,
    watch: Watch = nobody,
) -> SourceLoss:
    """The loss of a portion, cut into the same sequences as when training evaluates on it.

    Args:
        scorer: the model.
        portion: the text, of the model's tokens.
        config: how it is cut.
        max_batches: how many batches to score, None for all.
        tell: called with a sentence before something that may take long.
        watch: called after each batch.

    Raises:
        UserError: there is nothing in it to predict, or too little to fill a sequence.
    """
    num_rows, length = scorer.batch_shape
    if config.packing == "concatenate" and portion.num_tokens <= length:
        raise UserError(
            f"{portion.label} has {portion.num_tokens} tokens, less than a sequence of data.sequence_length {length}; "
            "add data.packing=first_fit, which pads"
        )
    batches = evaluation_batches([portion], config, global_batch_size=num_rows, rows=np.arange(num_rows), tell=tell)
    count = len(batches) if max_batches is None else min(max_batches, len(batches))
    loss_sum, num_targets = 0.0, 0
    for number in range(count):
        fields = batches[number]
        log_probabilities, _ = scorer.score_batch(fields)
        counts = fields["loss_weights"] > 0
        loss_sum -= float(log_probabilities[counts].sum(dtype=np.float64))
        num_targets += int(counts.sum())
        watch(number + 1, count)
    if not num_targets:
        raise UserError(f"{portion.label} has no token that follows another in its document; give more text")
    predicted_bytes = num_targets * portion.num_bytes / portion.num_counted
    return SourceLoss(portion.label, loss_sum, num_targets, portion.num_counted, portion.num_bytes, predicted_bytes)
