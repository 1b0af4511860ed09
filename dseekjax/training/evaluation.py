"""Loss on held-out data."""

import math
from collections.abc import Callable
from typing import Any, Protocol

from dseekjax.training.feed import rows_of_process, to_devices
from dseekjax.training.hooks import Record
from dseekjax.training.program import Program
from dseekjax.training.state import TrainState


class Batches(Protocol):
    """Random access to this process's rows of each batch."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> dict[str, Any]: ...


Evaluation = Callable[[TrainState], Record]


def build_evaluation(
    program: Program, batches: Batches, *, bytes_per_token: float, max_batches: int | None
) -> Evaluation:
    """A function from a state to `eval_loss` (nats per token that counts) and `eval_bits_per_byte`.

    Both are None where no token of those batches counts.

    Args:
        program: whose `eval_step` runs.
        batches: all evaluation batches.
        bytes_per_token: bytes of text over tokens, both of what the loss counts.
        max_batches: how many of them to use, None for all.
    """
    rows = rows_of_process(program.batch_shape)
    count = len(batches) if max_batches is None else min(max_batches, len(batches))

    def evaluate(state: TrainState) -> Record:
        sums = [program.eval_step(state, to_devices(batches[i], rows, program.batch_shape)) for i in range(count)]
        weight = sum(float(each["weight"]) for each in sums)
        if not weight:
            return {"eval_loss": None, "eval_bits_per_byte": None}
        loss = sum(float(each["loss"]) for each in sums) / weight
        return {"eval_loss": loss, "eval_bits_per_byte": loss / math.log(2) / bytes_per_token}

    return evaluate
