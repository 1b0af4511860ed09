"""The model against independent references, and what it promises about memory and documents."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import plain_step
import pytest
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st
from plain_layout import plain_parameters

from dseekjax.config import load_config, recipe_path
from dseekjax.models.config import LinearRotaryScaling, Llama3RotaryScaling, NoRotaryScaling
from dseekjax.models.decoder import Decoder
from dseekjax.models.flops import forward_flops_per_token, parameter_count, training_flops_per_token
from dseekjax.models.layers.cross_entropy import chunked_cross_entropy
from dseekjax.models.layers.rotary import frequencies
from dseekjax.models.operations import contract, local_operations
from tests.references import llama
from tests.tiny import LLAMA, random_batch, random_fields, tiny_config

GPT = ("model.attention.num_kv_heads=4",)


def build(config, seed=0):
    """A model with every parameter random, also those that start as ones and zeros."""
    model = Decoder(config.model, local_operations(), nnx.Rngs(seed))
    graphdef, state = nnx.split(model)
    params = nnx.to_pure_dict(state)
    leaves, tree = jax.tree.flatten(params)
    keys = jax.random.split(jax.random.key(seed), len(leaves))
    params = tree.unflatten(
        [leaf + 0.1 * jax.random.normal(key, leaf.shape) for leaf, key in zip(leaves, keys, strict=True)]
    )
    return graphdef, params


def run_layers(model, batch, keys=None):
    x = model.embed(batch, keys)
    for run in model.runs:
        graphdef, stacked = nnx.split(run)
        for i in range(jax.tree.leaves(stacked)[0].shape[0]):
            block = nnx.merge(graphdef, jax.tree.map(lambda leaf, i=i: leaf[i], stacked))
            x, _, _ = block.block(x, batch, None, keys)
    return x


def logits_of(graphdef, params, batch):
    model = nnx.merge(graphdef, params)
    return model.unembed(run_layers(model, batch))


def test_scaled_rotations_are_those_of_the_formulas():
    plain = frequencies(8, 1e4, NoRotaryScaling())
    np.testing.assert_allclose(plain, [1, 0.1, 0.01, 0.001], rtol=1e-6)
    np.testing.assert_allclose(frequencies(8, 1e4, LinearRotaryScaling(factor=4)), plain / 4, rtol=1e-6)
    # Turns in 400 positions: 63.7 is fast, 6.37 between 4 and 9, and 0.637 and 0.0637 are slow.
    scaling = Llama3RotaryScaling(factor=8, low_frequency_factor=4, high_frequency_factor=9, original_positions=400)
    kept = (400 * 0.1 / (2 * math.pi) - 4) / 5
    expected = [1, 0.1 * (kept + (1 - kept) / 8), 0.01 / 8, 0.001 / 8]
    np.testing.assert_allclose(frequencies(8, 1e4, scaling), expected, rtol=1e-6)


def test_scaled_rotations_reach_the_model():
    config = tiny_config(*LLAMA, "model.rotary_scaling={kind: linear, factor: 2}", "train.global_batch_size=2")
    graphdef, params = build(config)
    fields = random_fields(config)
    expected = llama.logits(
        params, fields["tokens"], fields["positions"] / 2, fields["segment_ids"], config.model.rotary_theta
    )
    np.testing.assert_allclose(logits_of(graphdef, params, random_batch(config)), expected, atol=1e-4)


def losses_by_row(graphdef, params, batch):
    """Sum of losses of each row on its own."""

    def one(row):
        batch = jax.tree.map(lambda x: x[None], row)
        model = nnx.merge(graphdef, params)
        return model.loss(run_layers(model, batch), batch)[0]

    return jax.vmap(one)(batch)


def test_gpt_equals_plain_jax():
    config = tiny_config(*GPT)
    graphdef, params = build(config)
    fields = random_fields(config)
    expected = plain_step.forward(plain_parameters(params), fields)
    np.testing.assert_allclose(logits_of(graphdef, params, random_batch(config)), expected, atol=2e-5)


def test_llama_equals_float64_numpy():
    config = tiny_config(*LLAMA, "train.global_batch_size=2")
    graphdef, params = build(config)
    fields = random_fields(config)
    expected = llama.logits(
        params, fields["tokens"], fields["positions"], fields["segment_ids"], config.model.rotary_theta
    )
    np.testing.assert_allclose(logits_of(graphdef, params, random_batch(config)), expected, atol=1e-4)


@pytest.mark.parametrize("chunk", [1, 100, 128, 1000])
def test_chunked_loss_equals_whole_loss(chunk):
    config = tiny_config(f"model.loss_chunk={chunk}")
    graphdef, params = build(config)
    batch = random_batch(config)

    def chunked(params):
        model = nnx.merge(graphdef, params)
        return model.loss(run_layers(model, batch), batch)[0]

    def whole(params):
        log_probability = jax.nn.log_softmax(logits_of(graphdef, params, batch))
        label = jnp.take_along_axis(log_probability, jnp.asarray(batch.targets)[..., None], -1)[..., 0]
        return -(label * batch.loss_weights).sum()

    (a, da), (b, db) = (jax.jit(jax.value_and_grad(f))(params) for f in (chunked, whole))
    np.testing.assert_allclose(a, b, rtol=1e-6)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-4), da, db)


@given(st.integers(1, 40), st.integers(0, 1 << 16), st.floats(-2, 2))
def test_the_losss_gradient_is_that_of_the_definition(chunk, seed, factor):
    rng = np.random.default_rng(seed)
    x, kernel = (jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in ((2, 13, 4), (11, 4)))
    targets = jnp.asarray(rng.integers(0, 11, (2, 13)), jnp.int32)
    weights = jnp.asarray(rng.choice([0.0, 0.5, 1.0, 3.0], (2, 13)), jnp.float32)

    def chunked(x, kernel):
        return factor * chunked_cross_entropy(x, targets, weights, kernel, chunk, dense=contract)[0]

    def whole(x, kernel):
        log_probability = jax.nn.log_softmax(x @ kernel.T)
        label = jnp.take_along_axis(log_probability, targets[..., None], -1)[..., 0]
        return -factor * (label * weights).sum()

    (a, da), (b, db) = (jax.value_and_grad(f, (0, 1))(x, kernel) for f in (chunked, whole))
    np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5), da, db)


def test_a_position_of_weight_zero_may_have_infinite_logits():
    x = jnp.full((1, 2, 1), 1e30).at[0, 1].set(1.0)
    kernel = jnp.array([[1e30], [1.0]])
    loss = lambda x: chunked_cross_entropy(  # noqa: E731
        x, jnp.zeros((1, 2), jnp.int32), jnp.array([[0.0, 1.0]]), kernel, 8, dense=contract
    )[0]
    value, gradient = jax.value_and_grad(loss)(x)
    assert np.isfinite(value)
    assert np.isfinite(gradient).all()


@pytest.mark.parametrize("target", [-1, 3])
def test_a_target_that_the_vocabulary_lacks_makes_the_loss_nan(target):
    x, kernel, weights = jnp.ones((1, 2, 4)), jnp.ones((3, 4)), jnp.ones((1, 2))
    loss, _ = chunked_cross_entropy(x, jnp.array([[0, target]]), weights, kernel, 8, dense=contract)
    assert np.isnan(loss)


def test_whole_logits_never_exist():
    config = tiny_config("model.vocabulary_size=97", "model.loss_chunk=40")
    graphdef, params = build(config)
    batch = random_batch(config)

    def loss(params):
        model = nnx.merge(graphdef, params)
        return model.loss(run_layers(model, batch), batch)[0]

    largest = max(
        np.prod(shape) for shape in _shapes(jax.make_jaxpr(jax.grad(loss))(params).jaxpr) if shape[-1:] == (97,)
    )
    assert largest == 40 * 97


def _shapes(jaxpr):
    for equation in jaxpr.eqns:
        yield from (variable.aval.shape for variable in equation.outvars)
        for parameter in equation.params.values():
            inner = getattr(parameter, "jaxpr", parameter)
            if hasattr(inner, "eqns"):
                yield from _shapes(inner)


@pytest.mark.parametrize("implementation", ["reference", "blocked"])
@pytest.mark.parametrize("family", [GPT, LLAMA])
def test_changing_one_document_changes_no_other_documents_loss(family, implementation):
    config = tiny_config(*family, f"model.attention.implementation={implementation}")
    graphdef, params = build(config)
    batch = random_batch(config)
    segments = np.asarray(batch.segment_ids)
    changed_document = 2
    inside = segments == changed_document
    assert inside.any(axis=1).sum() > 8
    rng = np.random.default_rng(5)
    tokens = np.where(inside, rng.integers(0, 96, segments.shape), batch.tokens).astype(np.int32)
    changed = dataclasses.replace(batch, tokens=tokens)

    for document in range(1, segments.max() + 1):
        weights = batch.loss_weights * (segments == document)
        before, after = (
            losses_by_row(graphdef, params, dataclasses.replace(b, loss_weights=weights)) for b in (batch, changed)
        )
        if document == changed_document:
            assert (before != after).sum() > 8
        else:
            assert (before == after).all()


def test_dropout_drops_its_share_and_only_with_keys():
    config = tiny_config("model.dropout=0.25")
    graphdef, params = build(config)
    batch = random_batch(config)
    model = nnx.merge(graphdef, params)
    keys = jax.random.split(jax.random.key(0), batch.tokens.shape)
    plain, dropped = model.embed(batch), model.embed(batch, keys)
    zeros = np.asarray(dropped == 0)
    assert zeros.mean() == pytest.approx(0.25, abs=0.02)
    np.testing.assert_allclose(dropped[~zeros], plain[~zeros] / 0.75, rtol=1e-6)
    # Every token has a mask of its own, which depends on nothing but its key.
    alone = model.embed(jax.tree.map(lambda x: x[3:4], batch), keys[3:4])
    np.testing.assert_array_equal(alone[0], dropped[3])
    assert (zeros[0] != zeros[1]).any()


@pytest.mark.parametrize(
    "family",
    [
        *(GPT, LLAMA, ("model.biases=qkv", "model.feed_forward.activation=relu")),
        (*LLAMA, "model.biases=attention"),
    ],
)
def test_counted_parameters_are_the_models(family):
    config = tiny_config(*family)
    _, params = build(config)
    assert parameter_count(config.model) == sum(leaf.size for leaf in jax.tree.leaves(params))


@pytest.mark.parametrize(
    ("recipe", "parameters"),
    [
        # 12 layers of 12 d² + 13 d, d = 768; 50257 + 1024 rows of d; the last norm's 2 d.
        ("gpt2_124m", 12 * (12 * 768**2 + 13 * 768) + (50257 + 1024 + 2) * 768),
        # 96 layers of 12 d² + 13 d, d = 12288; 50304 + 2048 rows; the last norm.
        ("gpt3_175b", 96 * (12 * 12288**2 + 13 * 12288) + (50304 + 2048 + 2) * 12288),
        # The number that its authors give.
        ("llama3_8b", 8_030_261_248),
    ],
)
def test_recipes_have_the_published_number_of_parameters(recipe, parameters):
    assert parameter_count(load_config(recipe_path(recipe)).model) == parameters


def test_flops_are_those_of_every_matrix_product():
    config = load_config(recipe_path("gpt2_124m")).model
    d, length = 768, 1024
    # Per token and layer: qkv 3 d², output d², feed-forward 8 d²; scores and values of 512.5 keys on average.
    forward = 12 * (2 * 12 * d**2 + 2 * 2 * 512.5 * d) + 2 * 50257 * d
    assert forward_flops_per_token(config, length) == forward
    assert training_flops_per_token(config, length) == 3 * forward


def test_flops_equal_those_of_the_traced_program():
    """Multiplications in the jaxpr, where attention is dense, so that scores are counted whole."""
    config = tiny_config(*LLAMA, "model.attention.implementation=reference")
    graphdef, params = build(config)
    batch = random_batch(config)
    jaxpr = jax.make_jaxpr(lambda params: logits_of(graphdef, params, batch))(params).jaxpr
    size, length = config.model.attention, config.data.sequence_length
    dense_attention = config.model.num_layers * 4 * length * size.num_heads * size.head_dim
    counted_attention = config.model.num_layers * 4 * (length + 1) / 2 * size.num_heads * size.head_dim
    per_token = forward_flops_per_token(config.model, length) - counted_attention + dense_attention
    assert _dot_flops(jaxpr) == per_token * 16 * length


def _dot_flops(jaxpr):
    total = 0
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            (contracted, _), _ = equation.params["dimension_numbers"]
            left = equation.invars[0].aval.shape
            total += 2 * np.prod(equation.outvars[0].aval.shape) * np.prod([left[i] for i in contracted])
        for parameter in equation.params.values():
            inner = getattr(parameter, "jaxpr", parameter)
            if hasattr(inner, "eqns"):
                total += _dot_flops(inner)
    return total
