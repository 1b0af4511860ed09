"""FLOPs of traced programs against counts by other means."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

from dseekjax.models.flops import training_flops_per_token
from dseekjax.plan.flops import count_flops
from dseekjax.training.program import build_program
from tests.tiny import LLAMA, tiny_config


def flops(function, *shapes):
    return count_flops(jax.make_jaxpr(function)(*(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes)))


def test_products():
    assert flops(jnp.matmul, (8, 16), (16, 4)) == 2 * 8 * 16 * 4
    assert flops(lambda a, b: jnp.einsum("bij,bkj->bik", a, b), (3, 5, 7), (3, 2, 7)) == 2 * 3 * 5 * 2 * 7


def test_kernels_say_how_many_they_have():
    from pallas_kernels.attention import attention

    def attend(query):
        return attention(query, query, query, implementation="pallas_interpreted")

    pairs = 2 * 40 * 41 // 2
    assert flops(attend, (1, 40, 2, 16)) == 4 * pairs * 16
    assert flops(jax.vmap(attend), (3, 1, 40, 2, 16)) == 3 * 4 * pairs * 16


def test_convolution():
    def convolve(image, kernel):
        return jax.lax.conv_general_dilated(
            image, kernel, (1, 1), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC"), feature_group_count=2
        )

    assert flops(convolve, (2, 10, 10, 6), (3, 3, 3, 8)) == 2 * (2 * 8 * 8 * 8) * (3 * 3 * 3)


def test_loops_branches_and_calls():
    product = 2 * 8 * 8 * 8

    @jax.custom_vjp
    def custom(x):
        return x @ x

    custom.defvjp(lambda x: (x @ x, x), lambda x, g: (g @ x.T,))

    def program(x):
        x, _ = jax.lax.scan(lambda x, _: (jax.jit(custom)(x), None), x, length=5)
        return jax.lax.cond(x[0, 0] > 0, lambda x: x @ x @ x, lambda x: x @ x, x)

    assert flops(program, (8, 8)) == 5 * product + 2 * product
    # The two products of the branch have two gradients each; of a custom gradient the custom one counts.
    gradient = jax.value_and_grad(lambda x: custom(jnp.sin(x)).sum())
    assert flops(gradient, (8, 8)) == 2 * product
    recomputed = jax.value_and_grad(lambda x: jax.checkpoint(lambda x: jnp.sin(x @ x) @ x)(x).sum())
    plain = jax.value_and_grad(lambda x: (jnp.sin(x @ x) @ x).sum())
    assert flops(recomputed, (8, 8)) == flops(plain, (8, 8)) + product


def test_inside_a_shard_map_shapes_are_of_parts():
    mesh = AbstractMesh((2, 4), ("data", "fsdp"), axis_types=(AxisType.Auto,) * 2)

    def inner(x, y):
        return jax.shard_map(
            jnp.matmul, in_specs=(P(), P(None, "fsdp")), out_specs=P(None, "fsdp"), axis_names={"fsdp"}
        )(x, y)

    outer = jax.shard_map(inner, mesh=mesh, in_specs=(P("data"), P()), out_specs=P("data"), axis_names={"data"})
    assert flops(outer, (8, 16), (16, 12)) == 2 * 8 * 16 * 12


@pytest.mark.parametrize("family", [(), LLAMA])
@pytest.mark.parametrize("mesh", ["mesh.data=1", "mesh.data=4"])
def test_a_train_step_does_what_the_model_needs_and_the_masked_half_of_attention(family, mesh):
    config = tiny_config(*family, mesh, "model.attention.implementation=reference", "model.loss_chunk=96")
    program = build_program(config, 8)
    traced = program.train_step.trace(program.state_shape, program.batch_shape)
    length, tokens = config.data.sequence_length, config.data.sequence_length * config.train.global_batch_size
    model = config.model
    masked = 3 * model.num_layers * 4 * (length - (length + 1) / 2) * model.attention.num_heads
    per_token = training_flops_per_token(model, length) + masked * model.attention.head_dim
    assert count_flops(traced.jaxpr) == per_token * tokens
