"""The score step: how likely each target of a batch is."""

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import PartitionSpec

from dseekjax.models.batch import Batch
from dseekjax.models.layers.target_scores import TargetScores
from dseekjax.parallel.order import Arrange
from dseekjax.training.step import Step

Score = Callable[[Any, Batch], TargetScores]
"""`(params, batch) -> scores`, in the order of the batch, whatever the mesh makes of it."""


def build_score(step: Step, restore: Arrange) -> Score:
    """The score step, not jitted.

    Args:
        step: of the program, whose forward pass it shares.
        restore: undoes `step.arrange`.
    """

    def local_scores(params: Any, batch: Batch) -> TargetScores:
        scores: TargetScores = restore(step.forward.score(step.cast(params), {}, step.arrange(batch)))
        return scores

    return jax.shard_map(
        local_scores,
        mesh=step.mesh,
        in_specs=(PartitionSpec(), PartitionSpec("data")),
        out_specs=PartitionSpec("data"),
        axis_names={"data"},
        check_vma=False,
    )
