"""From open sources to batches, as the data config says."""

from collections.abc import Callable, Sequence

import numpy as np
from jaxtyping import Int

from dseekjax.data.batches import EvaluationBatches
from dseekjax.data.config import DataConfig
from dseekjax.data.corpus import Portion
from dseekjax.data.endless import Shuffled, Source, order_key
from dseekjax.data.feed import TrainingFeed
from dseekjax.data.fitting import describe_cut
from dseekjax.data.packing import open_index
from dseekjax.data.records import Concatenated, Packed, Records
from dseekjax.data.sources import Data
from dseekjax.data.streaming import Stream, Streamed
from dseekjax.errors import UserError

Tell = Callable[[str], None]


def training_feed(
    data: Data,
    config: DataConfig,
    *,
    seed: int,
    global_batch_size: int,
    rows: Int[np.ndarray, "rows"],
    num_batches: int,
    tell: Tell = lambda sentence: None,
) -> TrainingFeed:
    """What training is fed.

    Args:
        data: opened by the same config.
        config: how it is cut and mixed.
        seed: of the order.
        global_batch_size: rows of a batch in all processes.
        rows: those of this process.
        num_batches: how many are wanted in all.
        tell: called with a sentence before something that may take long.

    Raises:
        UserError: a source has no record or not enough, or its packing cannot be kept.
    """
    return TrainingFeed(
        training_sources(data, config, seed, tell),
        [source.weight for source in config.sources],
        [source.max_epochs for source in config.sources],
        global_batch_size=global_batch_size,
        rows=rows,
        num_batches=num_batches,
        prefetch=config.prefetch_batches,
        held_out=data.held_out,
    )


def training_sources(data: Data, config: DataConfig, seed: int, tell: Tell = lambda sentence: None) -> list[Source]:
    """What training takes its records from, before it is mixed; arguments and errors as above."""
    sources: list[Source] = []
    for i, source in enumerate(data.training):
        key = order_key(seed, i)
        if isinstance(source, Stream):
            if config.packing != "concatenate":
                raise UserError(
                    f"data.packing {config.packing} needs to know all documents, and data.sources.{i} is streaming; "
                    "prepare it, or set data.packing to concatenate"
                )
            sources.append(Streamed(source, config.sequence_length, key))
        else:
            sources.append(Shuffled(_records(source, config, tell), key))
    return sources


def evaluation_batches(
    portions: Sequence[Portion],
    config: DataConfig,
    *,
    global_batch_size: int,
    rows: Int[np.ndarray, "rows"],
    tell: Tell = lambda sentence: None,
) -> EvaluationBatches:
    """All of what is held out, or of the evaluation sources; arguments and errors as above."""
    return EvaluationBatches([_records(portion, config, tell) for portion in portions], global_batch_size, rows)


def _records(portion: Portion, config: DataConfig, tell: Tell) -> Records:
    if cut := describe_cut(portion, config.sequence_length, config.packing):
        tell(cut)
    if config.packing == "concatenate":
        return Concatenated.of(portion, config.sequence_length)
    return Packed.of(portion, open_index(portion, config.sequence_length, tell), config.sequence_length)
