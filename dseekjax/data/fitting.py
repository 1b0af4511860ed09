"""Examples of prompts and answers that do not fit into a sequence."""

import numpy as np

from dseekjax.data.corpus import Portion
from dseekjax.data.packing import pieces


def describe_cut(portion: Portion, sequence_length: int, packing: str) -> str | None:
    """A sentence for the user on examples that are not whole in a sequence; None if all are, or there are none.

    Args:
        portion: of any corpus; one without a mask holds no examples.
        sequence_length: tokens.
        packing: as in the data config.
    """
    if portion.corpus.mask is None:
        return None
    ends = np.asarray(portion.corpus.document_ends)
    stops = ends[(ends > portion.start) & (ends <= portion.stop)]
    begins = np.concatenate([[portion.start], stops[:-1]])
    whole = f"{len(stops):,} examples of {portion.label}"
    if packing == "concatenate":
        # The last token of an example is a target only.
        first, last = ((places - portion.start) // sequence_length for places in (begins, stops - 2))
        num_cut = int((last > first).sum())
        if not num_cut:
            return None
        return (
            f"{num_cut:,} of {whole} are cut where a sequence ends, and what follows does not see the prompt; "
            "data.packing=first_fit keeps them whole."
        )
    num_long = int((stops - begins - 1 > sequence_length).sum())
    num_left_out = len(stops) - sum(len(starts) for starts, _ in pieces(portion, sequence_length))
    if not num_long:
        return None
    return (
        f"{num_long:,} of {whole} are longer than data.sequence_length {sequence_length}: what is beyond it is left out"
        + (f", and {num_left_out:,} of them altogether, for their prompts fill it." if num_left_out else ".")
    )
