"""From a batch to sums of losses, or scores of its targets: the model's parts put together."""

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Key

from dseekjax.models.batch import Batch
from dseekjax.models.layers.target_scores import TargetScores
from dseekjax.parallel.placement import gather_tree
from dseekjax.training.layers import LayerLoop

Sums = dict[str, Float[Array, ""]]
"""`loss`, `weight` and what else the model reports, each summed over positions."""


@dataclass(frozen=True)
class Forward:
    """A model without its parameters: called with them, it gives the sums of a batch, or scores."""

    graphdef: Any
    specs: Any
    """Where each parameter rests, seen from inside the manual axes."""
    run_layers: LayerLoop

    def __call__(self, params: Any, variables: Any, batch: Batch, keys: Key[Array, "batch seq"] | None = None) -> Sums:
        """Runs all layers; `keys`, one per token, turn dropout on."""
        model, x, reported = self._run(params, variables, batch, keys)
        loss_sum, weight_sum, metrics = model.loss(x, batch)
        return {"loss": loss_sum, "weight": weight_sum, **reported, **metrics}

    def score(self, params: Any, variables: Any, batch: Batch) -> TargetScores:
        """How likely each target is."""
        model, x, _ = self._run(params, variables, batch, None)
        scores: TargetScores = model.score(x, batch)
        return scores

    def _run(
        self, params: Any, variables: Any, batch: Batch, keys: Key[Array, "batch seq"] | None
    ) -> tuple[Any, Any, Sums]:
        """The model, its last activations, and the sums that layers report."""
        outer, outer_specs = _without_runs(params), _without_runs(self.specs)
        model = nnx.merge(self.graphdef, {**gather_tree(outer, outer_specs), "runs": params["runs"]}, variables)
        x = model.embed(batch, _fold(keys, 0))
        reported: Sums = {}
        first = 1
        for i, run in enumerate(model.runs):
            block_graphdef, block_state = nnx.split(run)
            stacked = nnx.to_pure_dict(block_state)
            layer_specs = jax.tree.map(lambda spec: jax.P(*spec[1:]), self.specs["runs"][i])

            def layer(
                x: Any, params: Any, number: jax.Array, constants: tuple[Batch, Any], graphdef: Any = block_graphdef
            ) -> tuple[Any, Sums]:
                batch, keys = constants
                x, _, auxiliary = nnx.merge(graphdef, params).block(x, batch, None, _fold(keys, number))
                return x, auxiliary

            count = jax.tree.leaves(stacked)[0].shape[0]
            numbers = first + jnp.arange(count)
            x, auxiliary = self.run_layers(
                layer, functools.partial(gather_tree, specs=layer_specs), x, stacked, numbers, (batch, keys)
            )
            first += count
            for name, per_layer in auxiliary.items():
                reported[name] = reported.get(name, jnp.zeros(())) + per_layer.sum()
        return model, x, reported


def _without_runs(tree: dict[str, Any]) -> dict[str, Any]:
    return {name: part for name, part in tree.items() if name != "runs"}


def _fold(keys: jax.Array | None, number: int | jax.Array) -> jax.Array | None:
    return None if keys is None else jax.vmap(jax.vmap(jax.random.fold_in, (0, None)), (0, None))(keys, number)
