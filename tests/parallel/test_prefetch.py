import re
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dseekjax.errors import UserError
from dseekjax.parallel.config import AXES, MeshConfig
from dseekjax.parallel.prefetch import choose_prefetch, scan_carrying
from dseekjax.training.program import build_program
from tests.tiny import LLAMA, tiny_config

# A feed-forward width that no other dimension has, so that shapes in compiled programs tell what they are.
WIDE = (*LLAMA, "model.feed_forward.hidden_dim=136")


@pytest.mark.parametrize(
    ("asked", "sizes", "recomputes", "microbatches", "chosen"),
    [
        ("auto", {"fsdp": 8}, True, 1, "compiler"),
        ("auto", {"fsdp": 8}, True, 2, "none"),
        ("compiler", {"fsdp": 8}, False, 2, "compiler"),
        ("auto", {"fsdp": 8, "data": 2, "expert": 2}, False, 1, "none"),
        ("auto", {"fsdp": 4, "tensor": 2}, True, 2, "carry"),
        ("auto", {"fsdp": 4, "context": 2}, True, 1, "carry"),
        ("auto", {"fsdp": 4, "tensor": 2}, False, 1, "none"),
        ("auto", {"data": 8}, True, 1, "none"),
        ("carry", {"data": 8}, True, 1, "none"),
        ("carry", {"fsdp": 8}, True, 1, "carry"),
        ("none", {"fsdp": 8}, True, 1, "none"),
    ],
)
def test_what_auto_comes_to(asked, sizes, recomputes, microbatches, chosen):
    sizes = {**dict.fromkeys(AXES, 1), **sizes}
    config = MeshConfig(fsdp_prefetch=asked)
    found = choose_prefetch(config, sizes, recomputes_layers=recomputes, num_microbatches=microbatches)
    assert found == chosen


def test_what_cannot_be_is_refused():
    sizes = {**dict.fromkeys(AXES, 1), "fsdp": 4, "tensor": 2}
    with pytest.raises(UserError, match=r"fsdp_prefetch compiler would pipeline.*set it to auto or carry"):
        choose_prefetch(MeshConfig(fsdp_prefetch="compiler"), sizes, recomputes_layers=True, num_microbatches=1)
    with pytest.raises(UserError, match=r"mesh.fsdp_prefetch carry.*memory.recompute is every_k; set memory.recompute"):
        tiny_config("mesh.fsdp_prefetch=carry", "memory.recompute=every_k", "memory.recompute_every=2")


@pytest.mark.parametrize("layers", [1, 2, 5])
def test_the_carrying_loop_equals_a_plain_one(layers):
    """On a carry of several arrays, with sums to report, and with keys and integers that have no gradient."""
    keys = jax.random.split(jax.random.key(0), layers)
    stacked = {
        "kernel": jax.random.normal(jax.random.key(1), (layers, 3, 3)),
        "bias": jax.random.normal(jax.random.key(2), (layers, 3)),
    }
    carry = (jnp.linspace(-1.0, 1.0, 6).reshape(2, 3), jnp.ones(3))
    constants = {"places": jnp.array([0, 2]), "weights": jnp.array([0.5, 2.0])}

    def gather(params):
        return jax.tree.map(lambda x: 2 * x, params)

    def layer(carry, params, key, constants):
        x, y = carry
        mixed = jnp.tanh(x @ params["kernel"] + params["bias"] + jax.random.normal(key, x.shape))
        y = y * mixed[constants["places"] // 2].sum(0)
        return (x + mixed * constants["weights"][:, None], y), {"sum": mixed.sum(), "last": y[-1]}

    def total(run):
        def loss(carry, stacked):
            (x, y), sums = run(carry, stacked)
            return (x**2).sum() + y.sum() + (sums["sum"] * jnp.arange(layers)).sum() + sums["last"][0]

        return jax.value_and_grad(loss, argnums=(0, 1))(carry, stacked)

    ours = total(lambda carry, stacked: scan_carrying(layer, gather, carry, stacked, keys, constants))
    plain = total(
        lambda carry, stacked: jax.lax.scan(
            lambda carry, own: layer(carry, gather(own[0]), own[1], constants), carry, (stacked, keys)
        )
    )
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), ours, plain)


def compiled(*overrides):
    program = build_program(tiny_config(*WIDE, *overrides), jax.devices())
    text = program.train_step.lower(program.state_shape, program.batch_shape).compile().as_text()
    return program, text


def collectives_by_computation(text):
    counts = [Counter(re.findall(r" (all-gather|all-reduce|reduce-scatter)\(", part)) for part in text.split("\n\n")]
    return [count for count in counts if count]


def whole_kernels(text, tensor=1):
    """Feed-forward kernels of all layers that are not sharded over fsdp, in any order of dimensions."""
    parts = sorted((4, 32, 136 // tensor))
    return [shape for shape in re.findall(r"f32\[([\d,]+)\]", text) if sorted(map(int, shape.split(","))) == parts]


@pytest.mark.parametrize("prefetch", ["carry", "none"])
def test_a_layer_gathers_each_parameter_once_a_pass(prefetch):
    program, text = compiled("memory.recompute=full", f"mesh.fsdp_prefetch={prefetch}")
    parameters = len(jax.tree.leaves(program.state_shape.params["runs"]))
    *loops, outside = sorted(collectives_by_computation(text), key=lambda count: count["all-reduce"])
    # On CPU the gradients of a layer are one all-reduce, of which each device takes its part.
    assert [(count["all-gather"], count["all-reduce"]) for count in loops] == [(parameters, 0), (parameters, 1)]
    first = parameters if prefetch == "carry" else 0
    assert outside["all-gather"] == 3 + first  # token numbers, the output table, the last norm
    assert not whole_kernels(text)


def test_round_the_ring_gradients_are_scattered():
    _, text = compiled("memory.recompute=full", "mesh.fsdp=4", "mesh.tensor=2", "mesh.tensor_overlap=ring")
    reduced = {tuple(map(int, shape.split(","))) for shape in re.findall(r"f32\[([\d,]+)\][^=]*? all-reduce\(", text)}
    assert reduced
    assert not any(32 in shape and 68 in shape for shape in reduced)
    assert max(count["reduce-scatter"] for count in collectives_by_computation(text)) >= 7
    assert not whole_kernels(text, tensor=2)


@pytest.mark.parametrize(("mesh", "tensor"), [((), 1), (("mesh.fsdp=4", "mesh.tensor=2"), 2)])
def test_gathered_parameters_are_not_kept_though_all_activations_are(mesh, tensor):
    _, text = compiled("memory.recompute=none", *mesh)
    assert not whole_kernels(text, tensor)
    assert re.search(r"f32\[4,32,(136|68)\]|f32\[4,\d+,24,(136|68)\]", text)
