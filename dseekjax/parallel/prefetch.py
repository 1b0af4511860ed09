"""When parameters that rest in shards are gathered, and the loop over layers that gathers ahead by hand."""

from collections.abc import Callable, Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp

from dseekjax.errors import UserError
from dseekjax.parallel.config import MeshConfig
from dseekjax.parallel.sharding import shards_parameters

Prefetch = Literal["compiler", "carry", "none"]
Layer = Callable[[Any, Any, Any, Any], tuple[Any, Any]]
"""`(carry, one layer's gathered parameters, its slice of what is per layer, constants) -> (carry, sums to report)`."""


def choose_prefetch(
    config: MeshConfig, sizes: Mapping[str, int], *, recomputes_layers: bool, num_microbatches: int
) -> Prefetch:
    """What `mesh.fsdp_prefetch` comes to on a mesh of these sizes.

    The compiler pipelines whatever communication of a loop it can. Where activations are moved too it takes theirs
    along, and the temporaries of Llama 3 8B on fsdp 8 x tensor 8 went from 63 to 209 GiB; so there the loop is written
    by hand, which takes them to 64 and the exposed share of gathered parameters from 48 % to 6 %. On fsdp 64 that loop
    is the worse of the two: its backward pass has nothing left to hide the next gather behind after the reduce-scatter.
    Nor does the compiler stop at the loop over layers: with eight microbatches it takes their loop apart as well; the
    exposed share went from 44 % to 4 %, but the temporaries from 8.9 to 15.9 GiB, so `auto` leaves it plain.

    Args:
        config: what is asked for.
        sizes: of all mesh axes.
        recomputes_layers: whether each layer's input is all that is kept of it.
        num_microbatches: of a step.

    Raises:
        UserError: the compiler is asked for on a mesh where activations move.
    """
    moves_activations = sizes["tensor"] > 1 or sizes["context"] > 1
    if not shards_parameters(sizes):
        return "none"
    if config.fsdp_prefetch == "compiler" and moves_activations:
        raise UserError(
            "mesh.fsdp_prefetch compiler would pipeline the communication of mesh axes tensor and context too, at the "
            "cost of several times the memory; set it to auto or carry"
        )
    if config.fsdp_prefetch != "auto":
        return config.fsdp_prefetch
    if not recomputes_layers:
        return "none"
    if moves_activations:
        return "carry"
    return "compiler" if num_microbatches == 1 else "none"


def gather_again(layer: Layer, gather: Callable[[Any], Any]) -> Layer:
    """`layer` of resting parameters, which gathers them, and gathers them again in the backward pass.

    All that differentiating `layer` keeps is kept but gathered parameters, which over all layers would be the whole
    model on every device. A checkpoint with a policy would not do: it overrides those inside of `layer`.
    """
    places: list[int | None] = []
    structures: list[Any] = []

    @jax.custom_vjp
    def run(carry: Any, params: Any, own: Any, constants: Any) -> tuple[Any, Any]:
        return layer(carry, gather(params), own, constants)

    def forward(carry: Any, params: Any, own: Any, constants: Any) -> tuple[Any, Any]:
        gathered = gather(params)
        out, pull = jax.vjp(lambda carry, params: layer(carry, params, own, constants), carry, gathered)
        kept, structure = jax.tree.flatten(pull)
        numbers = {id(leaf): number for number, leaf in enumerate(jax.tree.leaves(gathered))}
        places[:] = [numbers.get(id(leaf)) for leaf in kept]
        structures[:] = [structure]
        return out, ([leaf for leaf, place in zip(kept, places, strict=True) if place is None], params)

    def backward(residuals: Any, gradients: Any) -> tuple[Any, Any, None, None]:
        others, params = residuals
        gathered, reduce = jax.vjp(gather, params)
        leaves, rest = jax.tree.leaves(gathered), iter(others)
        pull = jax.tree.unflatten(structures[0], [next(rest) if place is None else leaves[place] for place in places])
        carry_gradient, of_gathered = pull(gradients)
        return carry_gradient, reduce(of_gathered)[0], None, None

    run.defvjp(forward, backward)
    return run


def scan_carrying(
    layer: Layer, gather: Callable[[Any], Any], carry: Any, stacked: Any, per_layer: Any, constants: Any
) -> tuple[Any, Any]:
    """Runs all layers one after the other; gradients reach `carry` and `stacked`, nothing else.

    Forward and backward, the loop carries the gathered parameters of the layer at work and gathers those of the layer
    that comes next, which do not depend on each other: the compiler can run them side by side. Every layer's input is
    kept; the backward pass, written out because that of the plain loop would keep what it carries, gathers and computes
    each layer again. One gather more than the plain loop's is the price, of the first layer in the backward pass.

    Args:
        layer: must not close over anything that is traced.
        gather: one layer's parameters, from where they rest to where they are used; linear, and the placement of its
            gradient is that of the result.
        carry: floating-point arrays, with the same shapes before and after each layer.
        stacked: parameters of all layers, with a leading axis of layers.
        per_layer: integers and keys with a leading axis of layers.
        constants: what every layer is given.

    Returns:
        The last carry, and the reported sums stacked per layer.
    """
    count = jax.tree.leaves(stacked)[0].shape[0]

    def resting(stacked: Any, number: jax.Array) -> Any:
        return jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, number, keepdims=False), stacked)

    def forward(carry: Any, stacked: Any, per_layer: Any, constants: Any) -> tuple[Any, Any, Any, Any]:
        def step(state: tuple[Any, Any], place: tuple[Any, jax.Array]) -> tuple[Any, Any]:
            before, current = state
            own, following = place
            upcoming = gather(resting(stacked, following))
            after, sums = layer(before, current, own, constants)
            return (after, upcoming), (sums, before)

        # After the last layer comes the last again: the first that the backward pass needs.
        following = jnp.minimum(jnp.arange(1, count + 1), count - 1)
        first = gather(jax.tree.map(lambda x: x[0], stacked))
        (carry, last), (sums, inputs) = jax.lax.scan(step, (carry, first), (per_layer, following))
        return carry, sums, inputs, last

    @jax.custom_vjp
    def run(carry: Any, stacked: Any, per_layer: Any, constants: Any) -> tuple[Any, Any]:
        carry, sums, _, _ = forward(carry, stacked, per_layer, constants)
        return carry, sums

    def run_forward(carry: Any, stacked: Any, per_layer: Any, constants: Any) -> tuple[Any, Any]:
        carry, sums, inputs, last = forward(carry, stacked, per_layer, constants)
        return (carry, sums), (inputs, last, stacked, per_layer, constants)

    def run_backward(kept: Any, gradients: tuple[Any, Any]) -> tuple[Any, Any, None, None]:
        inputs, last, stacked, per_layer, constants = kept
        carry_gradient, sums_gradients = gradients

        def step(state: tuple[Any, Any], place: tuple[Any, ...]) -> tuple[Any, Any]:
            gradient, current = state
            number, own, before, sums_gradient = place
            upcoming = gather(resting(stacked, jnp.maximum(number - 1, 0)))
            _, pull = jax.vjp(lambda carry, params: layer(carry, params, own, constants), before, current)
            gradient, of_gathered = pull((gradient, sums_gradient))
            _, reduce = jax.vjp(gather, resting(stacked, number))
            return (gradient, upcoming), reduce(of_gathered)[0]

        (carry_gradient, _), of_stacked = jax.lax.scan(
            step, (carry_gradient, last), (jnp.arange(count), per_layer, inputs, sums_gradients), reverse=True
        )
        return carry_gradient, of_stacked, None, None

    run.defvjp(run_forward, run_backward)
    return run(carry, stacked, per_layer, constants)
