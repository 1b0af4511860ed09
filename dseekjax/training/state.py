"""Everything that a resume needs, as one pytree."""

from dataclasses import dataclass
from typing import Any

import jax
from jaxtyping import Array, Int, UInt32


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState:
    """The state after `step` steps. Batches need no more than `step` to go on."""

    step: Int[Array, ""]
    params: Any
    """Master parameters, float32, a nested dict."""
    optimizer_state: Any
    variables: Any
    """What the model keeps beside its parameters."""
    rng: UInt32[Array, "2"]
    """Data of the key that every step's keys are folded from."""
    bad_steps: Int[Array, ""]
    """Steps in a row, up to the last one, whose update was skipped."""
