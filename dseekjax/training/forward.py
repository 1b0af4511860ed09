"""From a batch to sums of losses: the model's parts put together."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Key

from dseekjax.memory.config import MemoryConfig
from dseekjax.memory.recompute import scan_layers
from dseekjax.models.batch import Batch
from dseekjax.parallel.placement import gather_tree

Sums = dict[str, Float[Array, ""]]
"""`loss`, `weight` and what else the model reports, each summed over positions."""


@dataclass(frozen=True)
class Forward:
    """A model without its parameters: called with them, it gives the sums of a batch."""

    graphdef: Any
    specs: Any
    """Where each parameter rests, seen from inside the manual axes."""
    memory: MemoryConfig

    def __call__(self, params: Any, variables: Any, batch: Batch, keys: Key[Array, "batch seq"] | None = None) -> Sums:
        """Runs all layers; `keys`, one per token, turn dropout on."""
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
                x: Any, layer: tuple[Any, jax.Array], graphdef: Any = block_graphdef, specs: Any = layer_specs
            ) -> tuple[Any, Sums]:
                layer_params, number = layer
                block = nnx.merge(graphdef, gather_tree(layer_params, specs))
                x, _, auxiliary = block.block(x, batch, None, _fold(keys, number))
                return x, auxiliary

            count = jax.tree.leaves(stacked)[0].shape[0]
            x, auxiliary = scan_layers(layer, x, (stacked, first + jnp.arange(count)), self.memory)
            first += count
            for name, per_layer in auxiliary.items():
                reported[name] = reported.get(name, jnp.zeros(())) + per_layer.sum()
        loss_sum, weight_sum, metrics = model.loss(x, batch)
        return {"loss": loss_sum, "weight": weight_sum, **reported, **metrics}


def _without_runs(tree: dict[str, Any]) -> dict[str, Any]:
    return {name: part for name, part in tree.items() if name != "runs"}


def _fold(keys: jax.Array | None, number: int | jax.Array) -> jax.Array | None:
    return None if keys is None else jax.vmap(jax.vmap(jax.random.fold_in, (0, None)), (0, None))(keys, number)
