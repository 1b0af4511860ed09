"""Everything jitted that continues texts: the layers of training, one by one, with a cache of keys and values."""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from dseekjax.config import Config
from dseekjax.errors import UserError
from dseekjax.models.batch import Batch
from dseekjax.models.cache import KeysValues, LayerCache
from dseekjax.models.decoder import Block, Decoder
from dseekjax.models.layers.projection import Projection
from dseekjax.models.operations import Operations
from dseekjax.parallel.kernel_first import contract_kernel_first, turned_order, with_turned_kernels
from dseekjax.parallel.layout import Layout
from dseekjax.parallel.mesh import AnyMesh
from dseekjax.parallel.operations import build_operations
from dseekjax.parallel.placement import gather_tree
from dseekjax.parallel.sharding import Rules, build_rules, parameter_specs, partition_spec, shardings, without
from dseekjax.precision.policy import cast_parameters
from dseekjax.training.attention import SPLIT_BY_XLA, attention_name
from pallas_kernels.attention import attention

MANUAL_AXES = ("data",)
KEYS = ("batch", "kv_heads", "sequence", "head_dim")


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Weights:
    """Parameters ready for use: in the compute dtype, those of each layer apart."""

    outer: Any
    """What is around the layers."""
    layers: tuple[Any, ...]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Cache:
    """What is known of texts so far, in slots that all rows fill at the same time."""

    layers: tuple[KeysValues, ...]
    segment_ids: Int[Array, "batch slots"]
    """1 for a slot with a token, 0 for padding and for a free one."""
    positions: Int[Array, "batch"]
    """Of the token that comes next in each text."""
    slot: Int[Array, ""]
    """Where that goes."""


@dataclass(frozen=True)
class Inference:
    """How a model continues texts. Holds no array; each number of rows, of tokens and of slots is compiled apart."""

    rows_multiple: int
    """A batch must have a multiple of this many rows."""
    prepare: Callable[[Any], Weights]
    """`(params) -> weights`, from parameters as they are trained."""
    prefill: Callable[..., tuple[Float[Array, "batch vocab"], Cache]]
    """`(weights, tokens [batch, seq], lengths [batch], slots) -> (logits, cache)`: reads texts, the last `lengths` of
    `tokens`; logits, in float32, are of what comes next."""
    decode: Callable[[Weights, Cache, Int[Array, "batch"]], tuple[Float[Array, "batch vocab"], Cache]]
    """`(weights, cache, tokens) -> (logits, cache)`: a token more of each text; takes the memory of the cache given."""


def build_inference(config: Config, mesh: AnyMesh, devices: Sequence[jax.Device] | int) -> Inference:
    """The programs that continue texts, with parameters where they rest in training.

    Args:
        config: of the run.
        mesh: of its program.
        devices: that the program is built for.

    Raises:
        UserError: the mesh splits sequences.
    """
    if mesh.shape["context"] > 1:
        raise UserError(
            f"mesh.context {mesh.shape['context']} splits sequences, and text is generated a token at a time; set "
            "mesh.context=1, and mesh.fsdp=-1 takes its devices"
        )
    # A token to a row cannot be split over the devices that share a layer.
    usage = config.mesh.model_copy(update={"sequence_parallel": False, "tensor_overlap": "none"})
    rules = build_rules(usage)
    layout = Layout(without(rules, *MANUAL_AXES), dict(mesh.shape))

    def with_attention(name: Any) -> _Model:
        attend = functools.partial(attention, implementation=name)
        operations = build_operations(
            usage, layout, attend, contract_kernel_first, splits_attention=name in SPLIT_BY_XLA
        )
        return _Model.of(config, with_turned_kernels(operations), layout, mesh)

    reading = with_attention(attention_name(config, layout, devices))
    # A kernel works on blocks of queries; for one query to a row XLA makes two small products.
    continuing = with_attention("reference")

    def prepare(params: Any) -> Weights:
        def take(stacked: jax.Array, number: int, order: tuple[int, ...]) -> jax.Array:
            return stacked[number].transpose(order)

        return reading.apart(cast_parameters(params, config.precision), take)

    def over_data(function: Callable[..., Any], *in_specs: Any) -> Callable[..., Any]:
        return jax.shard_map(
            function,
            mesh=mesh,
            in_specs=in_specs,
            out_specs=(jax.P("data"), caches_over_data),
            axis_names=set(MANUAL_AXES),
            check_vma=False,
        )

    def prefill(weights: Weights, tokens: jax.Array, lengths: jax.Array, slots: int) -> tuple[jax.Array, Cache]:
        read = functools.partial(_prefill, reading, slots=slots)
        return over_data(read, jax.P(), jax.P("data"), jax.P("data"))(weights, tokens, lengths)

    def decode(weights: Weights, cache: Cache, tokens: jax.Array) -> tuple[jax.Array, Cache]:
        write = functools.partial(_decode, continuing)
        return over_data(write, jax.P(), caches_over_data, jax.P("data"))(weights, cache, tokens)

    caches_over_data = _cache_of(jax.P("data"), jax.P("data"))
    weights_at = shardings(reading.specs(rules, mesh), mesh)
    cache_at = shardings(_cache_of(partition_spec(KEYS, rules), partition_spec(("batch",), rules)), mesh)
    everywhere = shardings(jax.P(), mesh)
    return Inference(
        rows_multiple=math.prod(mesh.shape[axis] for axis in rules["batch"]),
        prepare=jax.jit(prepare, out_shardings=weights_at),
        prefill=jax.jit(
            prefill,
            static_argnums=3,
            in_shardings=(weights_at, everywhere, everywhere),
            out_shardings=(everywhere, cache_at),
        ),
        decode=jax.jit(
            decode,
            in_shardings=(weights_at, cache_at, everywhere),
            out_shardings=(everywhere, cache_at),
            donate_argnums=1,
        ),
    )


@dataclass(frozen=True)
class _Model:
    """A model without its parameters, taken apart as `Weights` are."""

    graphdef: Any
    abstract: Any
    """Its parameters, as shapes."""
    blocks: tuple[Any, ...]
    """Each run's layer without its parameters."""
    orders: tuple[Any, ...]
    """Each run's, of the dimensions of a layer's parameters in `Weights`."""
    layout: Layout
    inner_specs: Weights
    """Where weights rest, seen from inside the manual axes."""

    @classmethod
    def of(cls, config: Config, operations: Operations, layout: Layout, mesh: AnyMesh) -> "_Model":
        model = nnx.eval_shape(lambda: Decoder(config.model, operations, nnx.Rngs(params=jax.random.key(0))))
        graphdef, abstract, *_ = nnx.split(model, nnx.Param, ...)
        blocks = tuple(nnx.split(run)[0] for run in model.runs)
        apart = cls(graphdef, abstract, blocks, tuple(map(_orders, model.runs)), layout, Weights(None, ()))
        return dataclasses.replace(apart, inner_specs=apart.specs(layout.rules, mesh))

    def specs(self, rules: Rules, mesh: AnyMesh) -> Any:
        """Where weights rest."""

        def take(stacked: jax.P, number: int, order: tuple[int, ...]) -> jax.P:
            return jax.P(*(stacked[1 + dimension] for dimension in order))

        return self.apart(parameter_specs(self.abstract, rules, mesh), take)

    def apart(self, params: Any, take: Callable[[Any, int, tuple[int, ...]], Any]) -> Weights:
        """A tree like the parameters as one like `Weights`.

        Args:
            params: with a leaf for each parameter.
            take: from a leaf, the number of a layer and the order of its dimensions to what is of that layer.
        """
        layers = [
            jax.tree.map(lambda leaf, order, layer=layer: take(leaf, layer, order), params["runs"][run], orders)
            for run, (count, orders) in enumerate(zip(self._layers_per_run, self.orders, strict=True))
            for layer in range(count)
        ]
        return Weights({name: part for name, part in params.items() if name != "runs"}, tuple(layers))

    def whole(self, weights: Weights) -> tuple[Decoder, list[Block]]:
        """The model, to be used for what is around its layers, and the layers."""
        outer = gather_tree(weights.outer, self.inner_specs.outer)
        model = nnx.merge(self.graphdef, {**outer, "runs": nnx.to_pure_dict(self.abstract)["runs"]})
        blocks = [block for block, count in zip(self.blocks, self._layers_per_run, strict=True) for _ in range(count)]
        return model, [
            nnx.merge(block, gather_tree(params, specs))
            for block, params, specs in zip(blocks, weights.layers, self.inner_specs.layers, strict=True)
        ]

    @property
    def _layers_per_run(self) -> list[int]:
        runs = nnx.to_pure_dict(self.abstract)["runs"]
        return [jax.tree.leaves(runs[number])[0].shape[0] for number in range(len(runs))]


def _orders(run: Block) -> Any:
    """For each parameter of a layer, the order of its dimensions in `Weights`."""
    equations = {path: module.equation for path, module in nnx.iter_graph(run) if isinstance(module, Projection)}

    def order(path: Any, stacked: jax.ShapeDtypeStruct) -> tuple[int, ...]:
        *module, name = (key.key for key in path)
        if name == "kernel":
            return turned_order(equations[tuple(module)])
        return tuple(range(len(stacked.shape) - 1))

    return jax.tree.map_with_path(order, nnx.to_pure_dict(nnx.split(run)[1]))


def _prefill(
    reading: _Model, weights: Weights, tokens: jax.Array, lengths: jax.Array, *, slots: int
) -> tuple[jax.Array, Cache]:
    count = tokens.shape[1]
    positions = jnp.arange(count) - (count - lengths[:, None])
    segment_ids = (positions >= 0).astype(jnp.int32)
    batch = _batch(tokens, segment_ids, jnp.maximum(positions, 0))
    model, layers = reading.whole(weights)
    x = model.embed(batch)
    seen: list[KeysValues] = []
    for layer in layers:
        x, of_layer, _ = layer.block(x, batch)
        seen.append(jax.tree.map(lambda part: _with_room(part, slots, axis=2), of_layer))
    cache = Cache(tuple(seen), _with_room(segment_ids, slots, axis=1), lengths, jnp.int32(count))
    return model.unembed(x[:, -1:])[:, 0], cache


def _decode(continuing: _Model, weights: Weights, cache: Cache, tokens: jax.Array) -> tuple[jax.Array, Cache]:
    here = jnp.ones((tokens.shape[0], 1), jnp.int32)
    segment_ids = jax.lax.dynamic_update_slice_in_dim(cache.segment_ids, here, cache.slot, axis=1)
    batch = _batch(tokens[:, None], here, cache.positions[:, None])
    model, layers = continuing.whole(weights)
    x = model.embed(batch)
    seen: list[KeysValues] = []
    for layer, past in zip(layers, cache.layers, strict=True):
        x, of_layer, _ = layer.block(x, batch, LayerCache(past, cache.slot, segment_ids))
        seen.append(jax.tree.map(lambda part: continuing.layout.constrain(part, *KEYS), of_layer))
    return model.unembed(x)[:, 0], Cache(tuple(seen), segment_ids, cache.positions + 1, cache.slot + 1)


def _batch(tokens: jax.Array, segment_ids: jax.Array, positions: jax.Array) -> Batch:
    """Tokens of which none is a target."""
    return Batch(tokens, jnp.zeros_like(tokens), jnp.zeros(tokens.shape, jnp.float32), segment_ids, positions)


def _with_room(x: jax.Array, slots: int, axis: int) -> jax.Array:
    return jnp.pad(x, [(0, slots - size if dimension == axis else 0) for dimension, size in enumerate(x.shape)])


def _cache_of(keys: Any, rows: Any) -> Any:
    """A tree like `Cache` from what goes for all keys and values, and for what has a row per text."""
    layers: Any = keys
    return Cache(layers, rows, rows, jax.P())  # type: ignore[arg-type]
