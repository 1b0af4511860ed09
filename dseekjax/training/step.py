"""The train step: cast, gradients, exchange, clip, update."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float

from dseekjax.comms.exchange import plain_exchange
from dseekjax.models.batch import Batch
from dseekjax.optim.optimizer import clip_by_global_norm
from dseekjax.optim.schedules import Schedule
from dseekjax.parallel.mesh import AnyMesh
from dseekjax.parallel.order import Arrange
from dseekjax.training.forward import Forward, Sums
from dseekjax.training.gradients import gradient_sums
from dseekjax.training.state import TrainState

Metrics = dict[str, Float[Array, ""]]


@dataclass(frozen=True)
class Step:
    """The parts of a step, each one function chosen by config."""

    mesh: AnyMesh
    forward: Forward
    cast: Callable[[Any], Any]
    optimizer: optax.GradientTransformationExtraArgs
    schedule: Schedule
    clip_norm: float
    num_microbatches: int
    tokens_spec: PartitionSpec
    """Placement of what is one per token over the axes that are not manual."""
    arrange: Arrange
    """Order of tokens within it."""

    def train(self, state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        """One optimizer step. A non-finite loss or gradient changes nothing but `step` and `bad_steps`.

        A batch of which no target counts changes nothing but `step`; its loss, a mean of nothing, is told as 0.
        """
        gradients, sums = self.gradients(state, batch)
        counts = sums["weight"] > 0
        weight = jnp.where(counts, sums["weight"], 1.0)
        loss = sums["loss"] / weight
        gradients = jax.tree.map(lambda gradient: gradient / weight, gradients)
        gradients, gradient_norm = clip_by_global_norm(gradients, self.clip_norm)
        learning_rate = self.schedule(state.step)
        finite = jnp.isfinite(loss) & jnp.isfinite(gradient_norm)
        good = finite & counts
        direction, optimizer_state = self.optimizer.update(gradients, state.optimizer_state, state.params, good=good)
        params = jax.tree.map(
            lambda param, change: jnp.where(good, param - learning_rate * change, param), state.params, direction
        )
        bad_steps = jnp.where(good, 0, state.bad_steps + ~finite)
        metrics = {
            "loss": loss,
            "grad_norm": gradient_norm,
            "learning_rate": learning_rate,
            "target_tokens": sums["weight"],
            "bad_steps": bad_steps,
        }
        return (
            TrainState(state.step + 1, params, optimizer_state, state.variables, state.rng, bad_steps),
            metrics,
        )

    def evaluate(self, state: TrainState, batch: Batch) -> Sums:
        """Sums of a batch, without dropout."""

        def local_sums(params: Any, variables: Any, batch: Batch) -> Sums:
            return plain_exchange(self.forward(self.cast(params), variables, self.arrange(batch)))

        return self._manual_over_data(local_sums, 2, 1)(state.params, state.variables, batch)

    def gradients(self, state: TrainState, batch: Batch) -> tuple[Any, Sums]:
        """Gradients of the summed loss like `state.params`, in float32, and the sums, over the whole batch."""

        def local_gradients(
            params: Any, variables: Any, rng: jax.Array, examples: tuple[Batch, jax.Array]
        ) -> tuple[Any, Sums]:
            def loss(params: Any, examples: tuple[Batch, jax.Array]) -> Sums:
                batch, places = examples
                key = jax.random.wrap_key_data(rng)
                keys = jax.vmap(jax.vmap(jax.random.fold_in, (None, 0)), (None, 0))(key, places)
                return self.forward(params, variables, batch, keys)

            sums = gradient_sums(
                loss,
                self.cast(params),
                self.arrange(examples),
                self.num_microbatches,
                self.tokens_spec,
                self.forward.specs,
            )
            return plain_exchange(sums)

        places = jnp.arange(batch.tokens.size, dtype=jnp.uint32).reshape(batch.tokens.shape)
        rng = jax.random.key_data(jax.random.fold_in(jax.random.wrap_key_data(state.rng), state.step))
        reduced = self._manual_over_data(local_gradients, 3, 1)
        return reduced(state.params, state.variables, rng, (batch, places))

    def _manual_over_data(
        self, function: Callable[..., Any], num_replicated: int, num_split: int
    ) -> Callable[..., Any]:
        """Runs `function` on each replica's part of its last arguments, so that it sees sums not yet reduced."""
        specs = (PartitionSpec(),) * num_replicated + (PartitionSpec("data"),) * num_split
        return jax.shard_map(
            function,
            mesh=self.mesh,
            in_specs=specs,
            out_specs=PartitionSpec(),
            axis_names={"data"},
            check_vma=False,
        )
