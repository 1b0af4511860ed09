"""A corpus cut into records of one length."""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Int

from dseekjax.data.corpus import Corpus
from dseekjax.errors import UserError


@dataclass(frozen=True)
class Records:
    """Record `r` is the tokens from `r * sequence_length`, and one more, which is only a target.

    Documents follow each other without padding; a record may hold the end of one and the start of the next.
    """

    corpus: Corpus
    sequence_length: int

    def __post_init__(self) -> None:
        if len(self) < 1:
            raise UserError(
                f"data.sequence_length {self.sequence_length} is longer than {self.corpus.label}, which has "
                f"{len(self.corpus.tokens)} tokens; choose at most {len(self.corpus.tokens) - 1}, give more text, or "
                "hold out another part of it"
            )

    def __len__(self) -> int:
        return (len(self.corpus.tokens) - 1) // self.sequence_length

    def read(self, indices: Int[np.ndarray, "batch"]) -> dict[str, np.ndarray]:
        """The fields of a batch, each `[batch, sequence_length]`."""
        where = indices[:, None] * self.sequence_length + np.arange(self.sequence_length + 1)
        tokens = self.corpus.tokens[where].astype(np.int32)
        document = np.searchsorted(self.corpus.offsets, where, side="right") - 1
        start = np.maximum(self.corpus.offsets[document], where[:, :1])
        return {
            "tokens": tokens[:, :-1],
            "targets": tokens[:, 1:],
            "loss_weights": (document[:, :-1] == document[:, 1:]).astype(np.float32),
            "segment_ids": (document - document[:, :1] + 1)[:, :-1].astype(np.int32),
            "positions": (where - start)[:, :-1].astype(np.int32),
        }
