"""`build_program`: from a config and any devices to everything that is jitted."""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from dseekjax.config import Config
from dseekjax.errors import UserError
from dseekjax.models.batch import Batch
from dseekjax.models.decoder import Decoder
from dseekjax.models.flops import training_flops_per_token
from dseekjax.models.operations import contract
from dseekjax.optim.optimizer import build_optimizer
from dseekjax.optim.schedules import build_schedule
from dseekjax.parallel.compiler import Options, cpu_options, gpu_options, layer_bytes
from dseekjax.parallel.context import check_context
from dseekjax.parallel.layout import Layout
from dseekjax.parallel.mesh import AnyMesh, build_mesh
from dseekjax.parallel.operations import build_operations
from dseekjax.parallel.order import is_zigzag, order_of_rows, order_of_tokens
from dseekjax.parallel.prefetch import Prefetch, choose_prefetch
from dseekjax.parallel.sharding import (
    Rules,
    build_rules,
    parameter_specs,
    partition_spec,
    shardings,
    shards_parameters,
    without,
)
from dseekjax.precision.policy import cast_parameters
from dseekjax.training.attention import SPLIT_BY_XLA, attention_name
from dseekjax.training.forward import Forward, Sums
from dseekjax.training.inference import Inference, build_inference
from dseekjax.training.layers import build_layer_loop, unrolls_layers
from dseekjax.training.scoring import Score, build_score
from dseekjax.training.state import TrainState
from dseekjax.training.step import Step
from pallas_kernels.attention import attention

MANUAL_AXES = ("data",)
# What runs once is not worth optimising: on CPU, init compiles three times faster like this.
QUICK_COMPILE = {"xla_backend_optimization_level": 1}


@dataclass(frozen=True)
class Program:
    """Everything jitted, and the shape and placement of every array. Holds no array."""

    config: Config
    mesh: AnyMesh
    state_shape: TrainState
    """`ShapeDtypeStruct`s with shardings."""
    batch_shape: Batch
    compiler_options: Options
    """What XLA is told when it compiles the steps."""
    unrolls_layers: bool
    """Whether layers are compiled one by one, which is what `model.scan_layers` came to."""
    attention: str
    """What `model.attention.implementation` came to, or how sequences that are split attend in parts."""
    init: Callable[[], TrainState]
    """A new state from `run.seed`; the same on every mesh, to rounding."""
    train_step: jax.stages.Wrapped
    """`(state, batch) -> (state, metrics)`; gives its first argument's memory to the new state."""
    eval_step: Callable[[TrainState, Batch], Sums]
    score_step: Score
    """`(params, batch) -> scores` of every target, on all devices, in the order of the batch."""
    step: Step
    """What the steps are made of, not jitted."""

    def inference(self) -> Inference:
        """What continues texts, built when it is asked for.

        Raises:
            UserError: the mesh splits sequences.
        """
        return build_inference(self.config, self.mesh, self._devices)

    @property
    def _devices(self) -> Sequence[jax.Device] | int:
        return self.mesh.size if isinstance(self.mesh, AbstractMesh) else list(self.mesh.devices.flat)

    def compile_ahead(self) -> None:
        """Takes the time now that the first train step would: to trace, and to compile or find what was compiled."""
        self.train_step.lower(self.state_shape, self.batch_shape).compile()


def build_program(config: Config, devices: Sequence[jax.Device] | int) -> Program:
    """Builds the program of a config for `devices`; allocates nothing and reads nothing.

    Args:
        config: what to train.
        devices: real or compile-only devices, or just their number, which gives a program that lowers but cannot run.

    Raises:
        UserError: the mesh does not fit the devices, an array does not fit the mesh, or a setting of JAX does
            not fit the program.
    """
    _refuse_settings()
    mesh = build_mesh(config.mesh, devices)
    rules = build_rules(config.mesh)
    inner_rules = without(rules, *MANUAL_AXES)
    layout = Layout(inner_rules, dict(mesh.shape))
    check_context(config.mesh, layout, config.data.sequence_length, config.model.attention.num_heads)
    _check_batch(config, rules, mesh)
    attends_with = attention_name(config, layout, devices)
    operations = build_operations(
        config.mesh,
        layout,
        functools.partial(attention, implementation=attends_with),
        contract,
        splits_attention=attends_with in SPLIT_BY_XLA,
    )

    def new_model(key: jax.Array) -> Decoder:
        return Decoder(config.model, operations, nnx.Rngs(params=key))

    abstract_model = nnx.eval_shape(lambda: new_model(jax.random.key(0)))
    graphdef, param_state, *_ = nnx.split(abstract_model, nnx.Param, ...)
    specs = parameter_specs(param_state, rules, mesh)
    optimizer = build_optimizer(config.optimizer)

    def init() -> TrainState:
        init_key, step_key = jax.random.split(jax.random.key(config.run.seed))
        _, *states = nnx.split(new_model(init_key), nnx.Param, ...)
        params, variables = map(nnx.to_pure_dict, states)
        return TrainState(
            step=jnp.zeros((), jnp.int32),
            params=params,
            optimizer_state=optimizer.init(params),
            variables=variables,
            rng=jax.random.key_data(step_key),
            bad_steps=jnp.zeros((), jnp.int32),
        )

    state_specs = _state_specs(jax.eval_shape(init), specs)
    state_shape = _with_shardings(jax.eval_shape(init), state_specs, mesh)
    batch_spec = partition_spec(("batch", "sequence"), rules)
    batch_shape = _with_shardings(_batch_shape(config), _batch_of(batch_spec), mesh)
    prefetch = choose_prefetch(
        config.mesh,
        dict(mesh.shape),
        recomputes_layers=config.memory.recompute == "full",
        num_microbatches=config.train.num_microbatches,
    )
    platform = "none" if isinstance(devices, int) else devices[0].platform
    is_sharded = shards_parameters(mesh.shape)
    unrolled = unrolls_layers(
        config.model, platform, keeps_activations=config.memory.recompute == "none", is_sharded=is_sharded
    )
    step = Step(
        mesh=mesh,
        forward=Forward(
            graphdef,
            parameter_specs(param_state, inner_rules, mesh),
            build_layer_loop(prefetch, config.memory, unrolled=unrolled, is_sharded=is_sharded),
        ),
        cast=functools.partial(cast_parameters, config=config.precision),
        optimizer=optimizer,
        schedule=build_schedule(config.optimizer, config.train.steps),
        clip_norm=config.optimizer.clip_norm,
        num_microbatches=config.train.num_microbatches,
        tokens_spec=partition_spec(("batch", "sequence"), inner_rules),
        arrange=order_of_tokens(config.mesh, layout),
    )
    state_shardings, batch_shardings = _shardings(state_shape), _shardings(batch_shape)
    replicated = NamedSharding(mesh, PartitionSpec())
    options = _compiler_options(config, platform, mesh, prefetch, state_shape)
    return Program(
        config=config,
        mesh=mesh,
        step=step,
        state_shape=state_shape,
        batch_shape=batch_shape,
        compiler_options=options,
        unrolls_layers=unrolled,
        attention=config.mesh.context_attention if is_zigzag(config.mesh, layout) else attends_with,
        init=jax.jit(init, out_shardings=state_shardings, compiler_options=QUICK_COMPILE),
        train_step=jax.jit(
            step.train,
            in_shardings=(state_shardings, batch_shardings),
            out_shardings=(state_shardings, replicated),
            donate_argnums=0,
            compiler_options=options,
        ),
        eval_step=jax.jit(
            step.evaluate,
            in_shardings=(state_shardings, batch_shardings),
            out_shardings=replicated,
            compiler_options=options,
        ),
        score_step=jax.jit(
            build_score(step, order_of_rows(config.mesh, layout)),
            in_shardings=(state_shardings.params, batch_shardings),
            out_shardings=replicated,
            compiler_options=options,
        ),
    )


def _refuse_settings() -> None:
    """Settings of JAX's own, perhaps made for another program, with which this one would be another or fail."""
    for name, value, reason in (
        ("jax_enable_x64", True, "parameters and token ids have 32 bits"),
        ("jax_numpy_dtype_promotion", "strict", "arrays of several dtypes are added and multiplied"),
        ("jax_numpy_rank_promotion", "raise", "arrays of several ranks are added and multiplied"),
    ):
        if getattr(jax.config, name) == value:
            raise UserError(f"{name.upper()} is {value}, but {reason}; unset it")


def _compiler_options(
    config: Config, platform: str, mesh: AnyMesh, prefetch: Prefetch, state_shape: TrainState
) -> Options:
    dtype = config.precision.compute_dtype
    if platform == "cpu" and config.run.tune_cpu:
        length = config.data.sequence_length
        tokens = config.train.global_batch_size * length
        return cpu_options(dtype, training_flops_per_token(config.model, length) * tokens / mesh.size)
    if platform == "gpu":
        largest = layer_bytes(state_shape.params["runs"].values(), jnp.dtype(dtype).itemsize)
        return gpu_options(config.mesh, prefetch, largest)
    return {}


def _check_batch(config: Config, rules: Rules, mesh: AnyMesh) -> None:
    replicas = math.prod(mesh.shape[axis] for axis in rules["batch"])
    batch, microbatches = config.train.global_batch_size, config.train.num_microbatches
    if batch % (replicas * microbatches):
        raise UserError(
            f"train.global_batch_size {batch} does not divide into {replicas} replicas x {microbatches} microbatches; "
            f"make it a multiple of {replicas * microbatches}"
        )
    length, parts = config.data.sequence_length, math.prod(mesh.shape[axis] for axis in rules["residual_sequence"])
    if length % parts:
        raise UserError(
            f"data.sequence_length {length} does not divide into the {parts} parts that mesh axes "
            f"{' and '.join(rules['residual_sequence'])} cut it into; make it a multiple of {parts}"
        )


def _batch_of(value: Any) -> Batch:
    return Batch(**dict.fromkeys(Batch.__dataclass_fields__, value))


def _batch_shape(config: Config) -> Batch:
    shape = (config.train.global_batch_size, config.data.sequence_length)
    integers = jax.ShapeDtypeStruct(shape, jnp.int32)
    weights: Any = jax.ShapeDtypeStruct(shape, jnp.float32)
    return dataclasses.replace(_batch_of(integers), loss_weights=weights)


def _state_specs(state: TrainState, specs: Any) -> TrainState:
    nowhere: Any = PartitionSpec()
    structure: Any = jax.tree.structure(state.params)

    def like_params(node: Any) -> bool:
        return bool(structure == jax.tree.structure(node))

    # Whatever the optimizer keeps per parameter rests where the parameter does.
    optimizer_specs = jax.tree.map(
        lambda node: specs if like_params(node) else nowhere, state.optimizer_state, is_leaf=like_params
    )
    variables = jax.tree.map(lambda _: nowhere, state.variables)
    return TrainState(nowhere, specs, optimizer_specs, variables, nowhere, nowhere)


def _with_shardings(shapes: Any, specs: Any, mesh: AnyMesh) -> Any:
    return jax.tree.map(
        lambda shape, sharding: jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=sharding),
        shapes,
        shardings(specs, mesh),
    )


def _shardings(shapes: Any) -> Any:
    return jax.tree.map(lambda shape: shape.sharding, shapes)
