"""Attention on sequences that are split over `context`."""

import functools
import re
from collections import Counter

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import NamedSharding, PartitionSpec

from dseekjax.errors import UserError
from dseekjax.parallel.config import MeshConfig
from dseekjax.parallel.context import context_attention
from dseekjax.parallel.layout import Layout
from dseekjax.parallel.mesh import build_mesh
from dseekjax.parallel.order import half_chunks, order_of_tokens
from dseekjax.parallel.sharding import build_rules, without
from dseekjax.parallel.zigzag_attention import gathered_pairs, ring_pairs
from dseekjax.training.feed import rows_of_process, to_devices
from dseekjax.training.program import build_program
from pallas_kernels.attention import attention
from tests.references.attention import attention as exact
from tests.tiny import LLAMA, random_fields, tiny_config

BATCH, LENGTH, SIZE = 8, 16, 4


class OnMesh:
    """What a layer would see of a mesh over eight devices."""

    def __init__(self, **mesh):
        self.config = MeshConfig(**mesh)
        self.mesh = build_mesh(self.config, jax.devices())
        self.layout = Layout(without(build_rules(self.config), "data"), dict(self.mesh.shape))

    def run(self, function):
        spec = PartitionSpec("data")
        return jax.jit(
            jax.shard_map(function, mesh=self.mesh, in_specs=spec, out_specs=spec, axis_names={"data"}, check_vma=False)
        )

    def place(self, x, *names):
        return jax.device_put(x, NamedSharding(self.mesh, self.layout.spec(names)))

    def order(self):
        places = self.place(jnp.tile(jnp.arange(LENGTH), (BATCH, 1)), "batch", "sequence")
        return np.asarray(self.run(order_of_tokens(self.config, self.layout))(places))[0]

    def attention(self, heads, kv_heads, packed=True, causal=True):
        """Inputs in the order of their rows and a program from them to output and pullback, all in the mesh's order."""
        rng = np.random.default_rng(0)
        arrays = [rng.normal(size=(BATCH, LENGTH, n, SIZE)).astype(np.float32) for n in (heads, kv_heads, kv_heads)]
        segments = np.sort(rng.integers(0, 3, (BATCH, LENGTH)), axis=1).astype(np.int32)
        attend = context_attention(self.config, self.layout, attention)
        kv_axis = "kv_heads" if kv_heads % self.mesh.shape["tensor"] == 0 else "head_dim"
        places = [("batch", "sequence", axis, "head_dim") for axis in ("heads", kv_axis, kv_axis)]

        def run(q, k, v, ids):
            masks = {"query_segment_ids": ids, "key_segment_ids": ids} if packed else {}
            return jax.vjp(lambda q, k, v: attend(q, k, v, causal=causal, **masks), q, k, v)

        order = self.order()
        placed = [self.place(x[:, order], *place) for x, place in zip(arrays, places, strict=True)]
        placed.append(self.place(segments[:, order], "batch", "sequence"))
        return (*arrays, segments), placed, order, self.run(run)


WAYS = [
    # mesh, heads, kv_heads, packed, causal
    ({"context": 4, "context_attention": "all_to_all"}, 8, 2, True, True),
    ({"context": 2, "tensor": 2, "context_attention": "all_to_all"}, 12, 6, False, True),
    ({"context": 2, "tensor": 4, "context_attention": "all_to_all", "rules": {"kv_heads": ()}}, 24, 3, True, True),
    ({"context": 4, "context_attention": "all_gather"}, 4, 2, True, True),
    ({"context": 2, "tensor": 2, "context_attention": "all_gather"}, 4, 4, False, False),
    ({"context": 4, "context_attention": "ring"}, 2, 1, True, True),
    ({"context": 4, "tensor": 2, "context_attention": "ring"}, 4, 2, True, False),
    ({"context": 2, "tensor": 4, "context_attention": "ring", "rules": {"kv_heads": ()}}, 12, 2, False, True),
    ({"context": 2, "tensor": 2, "context_attention": "ring", "rules": {"heads": ()}}, 4, 2, True, True),
]


@pytest.mark.parametrize(("mesh", "heads", "kv_heads", "packed", "causal"), WAYS, ids=str)
def test_output_and_gradients_are_those_of_one_device(mesh, heads, kv_heads, packed, causal):
    (*arrays, segments), placed, order, run = OnMesh(**mesh).attention(heads, kv_heads, packed, causal)
    out, pull = run(*placed)
    masks = (segments, segments) if packed else ()
    expected = exact(*arrays, *masks, causal=causal)
    np.testing.assert_allclose(out, expected[:, order], rtol=1e-5, atol=1e-5)

    def loss(q, k, v):
        masks = {"query_segment_ids": segments, "key_segment_ids": segments} if packed else {}
        return jnp.sin(attention(q, k, v, causal=causal, implementation="reference", **masks)).sum()

    found = jax.jit(lambda pull, gradient: pull(gradient))(pull, jnp.cos(out))
    for a, b in zip(found, jax.jit(jax.grad(loss, (0, 1, 2)))(*arrays), strict=True):
        np.testing.assert_allclose(a, b[:, order], rtol=1e-4, atol=1e-5)


def test_rows_are_permuted_only_to_balance():
    zigzag = [0, 1, 14, 15, 2, 3, 12, 13, 4, 5, 10, 11, 6, 7, 8, 9]
    assert OnMesh(context=4, context_attention="ring").order().tolist() == zigzag
    assert OnMesh(context=4, context_attention="all_gather").order().tolist() == zigzag
    assert OnMesh(context=4, context_attention="all_to_all").order().tolist() == list(range(LENGTH))
    assert OnMesh(context=1, context_attention="ring").order().tolist() == list(range(LENGTH))


@given(st.integers(1, 6), st.booleans())
def test_every_device_works_on_what_it_sees_and_all_on_equally_much(devices, causal):
    everywhere = [chunk for device in range(devices) for chunk in half_chunks(device, devices)]
    assert sorted(everywhere) == list(range(2 * devices))
    for device in range(devices):
        own = half_chunks(device, devices)
        seen = Counter((a, b) for a in own for b in range(2 * devices) if b <= a or not causal)
        stops = [(step, half_chunks((device - step) % devices, devices)) for step in range(devices)]
        ring = [(own[int(a)], there[int(b)]) for step, there in stops for a, b in ring_pairs(step, device, causal)]
        gathered = [(own[a], everywhere[b]) for a, b in np.stack(gathered_pairs(device, devices, causal)).T]
        assert Counter(ring) == Counter(gathered) == seen
        assert len(ring) == (2 * devices + 1 if causal else 4 * devices)
        if causal:  # at every stop but the first, which has the diagonal
            assert {len(ring_pairs(step, device, causal)) for step in range(1, devices)} <= {2}


KINDS = ("all-gather", "all-reduce", "all-to-all", "collective-permute", "reduce-scatter")


def collectives(text):
    """How many collectives of each kind, those of segment ids left out."""
    found = re.findall(rf" = \(?(\w+)\[[^=]* ({'|'.join(KINDS)})(?:-start)?\(", text)
    return dict(Counter(kind for dtype, kind in found if dtype != "s32"))


@pytest.mark.parametrize(
    ("kind", "forward", "backward"),
    [
        # Query, key, value and output.
        ("all_to_all", {"all-to-all": 4}, {"all-to-all": 4}),
        # Key and value, and their gradients.
        ("all_gather", {"all-gather": 2}, {"all-gather": 2, "reduce-scatter": 2}),
        # Key and value go three hops, as one, to see four devices; their gradients go four to come home.
        ("ring", {"collective-permute": 3}, {"collective-permute": 3 + 4}),
    ],
)
def test_communication_is_what_theory_says(kind, forward, backward):
    _, placed, _, run = OnMesh(context=4, context_attention=kind).attention(8, 4)
    compiled = run.lower(*placed).compile()
    out, pull = compiled(*placed)
    pulled = jax.jit(lambda pull, gradient: pull(gradient)).lower(pull, out).compile()
    assert collectives(compiled.as_text()) == forward
    assert collectives(pulled.as_text()) == backward


def test_hops_of_the_ring_wait_for_no_work_that_they_can_hide_behind():
    """Beside each hop there is work that neither waits for it nor is waited for.

    Forward that is a stop's, two pairs or more; backward one pair or more beside the keys' hop and beside the sums'.
    """
    _, placed, _, run = OnMesh(context=4, context_attention="ring").attention(8, 4)
    out, pull = run(*placed)
    forward = jax.make_jaxpr(run)(*placed)
    backward = jax.make_jaxpr(lambda pull, gradient: pull(gradient))(pull, out)
    assert [products >= 2 * 2 for products in products_beside_hops(forward.jaxpr)] == [True] * 3
    # The gradients' last hop home comes after all work.
    assert [products >= 5 for products in products_beside_hops(backward.jaxpr)] == [True] * 6 + [False]


def products_beside_hops(jaxpr):
    """For each permute of floating-point numbers, how many matrix products are ordered neither before nor after it."""
    (level,) = [level for level in levels(jaxpr) if any(e.primitive.name == "ppermute" for e in level.eqns)]
    made_by, before = {}, []
    for number, equation in enumerate(level.eqns):
        direct = {made_by[v] for v in equation.invars if isinstance(v, jax.extend.core.Var) and v in made_by}
        before.append(direct.union(*(before[i] for i in direct)))
        made_by.update(dict.fromkeys(equation.outvars, number))
    products = [products_in(equation) for equation in level.eqns]
    for number, equation in enumerate(level.eqns):
        if equation.primitive.name == "ppermute" and equation.invars[0].aval.dtype == jnp.float32:
            beside = (i for i in range(len(before)) if i not in before[number] and number not in before[i])
            yield sum(products[i] for i in beside)


def levels(jaxpr):
    """A jaxpr and all those inside its equations."""
    yield jaxpr
    for equation in jaxpr.eqns:
        for parameter in equation.params.values():
            inner = getattr(parameter, "jaxpr", parameter)
            if hasattr(inner, "eqns"):
                yield from levels(inner)


def products_in(equation):
    inner = [getattr(parameter, "jaxpr", parameter) for parameter in equation.params.values()]
    found = [products_in(e) for jaxpr in inner if hasattr(jaxpr, "eqns") for e in jaxpr.eqns]
    return (equation.primitive.name == "dot_general") + sum(found)


LONG = ("model.dropout=0.1", "train.num_microbatches=2", "memory.recompute=full")


@functools.cache
def on_one_device():
    return gradients(tiny_config(*LLAMA, *LONG), 1)


def gradients(config, devices):
    program = build_program(config, jax.devices()[:devices])
    rows = rows_of_process(program.batch_shape)
    state, batch = program.init(), to_devices(random_fields(config), rows, program.batch_shape)
    found, sums = jax.jit(program.step.gradients)(state, batch)
    evaluated = program.eval_step(state, batch)
    return jax.tree.map(np.asarray, found), float(sums["loss"]), float(evaluated["loss"])


@pytest.mark.parametrize(
    "mesh",
    [
        ("mesh.context=4", "mesh.context_attention=all_gather"),
        ("mesh.context=2", "mesh.context_attention=ring", "mesh.tensor=2", "mesh.tensor_overlap=ring"),
        ("mesh.context=2", "mesh.data=2"),
    ],
    ids=str,
)
def test_a_model_has_the_loss_and_the_gradients_of_one_device(mesh):
    (expected, loss, evaluation), found = on_one_device(), gradients(tiny_config(*LLAMA, *LONG, *mesh), 8)
    assert found[1:] == pytest.approx((loss, evaluation), rel=1e-6)
    norm = np.sqrt(sum((x**2).sum() for x in jax.tree.leaves(expected)))
    for a, b in zip(jax.tree.leaves(expected), jax.tree.leaves(found[0]), strict=True):
        assert np.linalg.norm(a - b) <= 1e-5 * max(np.linalg.norm(a), 1e-3 * norm)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("mesh.context=8",), r"num_heads 4 does not divide over the 8 devices that mesh axes context give.* of 8, or"),
        (("mesh.context=4", "mesh.tensor=2"), r"over the 8 devices that mesh axes tensor and context"),
        (
            ("mesh.context=8", "mesh.context_attention=ring"),
            r"sequence_length 24 does not divide into the 16 half-chunks.*make it a multiple of 16",
        ),
        (
            ("mesh.context=2", "mesh.tensor=4", "mesh.context_attention=all_gather", "data.sequence_length=20"),
            r"sequence_length 20 .* 4 half-chunks by which .*all_gather.* make it a multiple of 8",
        ),
    ],
)
def test_what_does_not_divide_is_refused_when_the_program_is_built(overrides, message):
    with pytest.raises(UserError, match=message):
        build_program(tiny_config(*overrides), jax.devices())
