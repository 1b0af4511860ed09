"""Loss and gradients on every kind of mesh are those of one device, or the combination is refused.

A new axis or feature is one more line of `FACTORS`, and what it cannot be combined with one more of `REFUSED`.
"""

import functools
import itertools
import math
import random

import jax
import numpy as np
import pytest

from dseekjax.errors import UserError
from dseekjax.parallel.config import AXES
from dseekjax.training.feed import rows_of_process, to_devices
from dseekjax.training.program import build_program
from tests.tiny import LLAMA, random_fields, tiny_config

MAX_DEVICES = 8
# Every row of packed documents, with grouped queries. The first value of each is the one that is least likely to fail.
FACTORS = {
    **{axis: (f"mesh.{axis}=1", f"mesh.{axis}=2") for axis in AXES if axis != "pipe"},
    "overlap": ("mesh.tensor_overlap=none", "mesh.tensor_overlap=xla", "mesh.tensor_overlap=ring"),
    "context attention": (
        "mesh.context_attention=all_to_all",
        "mesh.context_attention=all_gather",
        "mesh.context_attention=ring",
    ),
    "rules": (
        (),
        "mesh.rules={vocab: []}",
        "mesh.rules={mlp: []}",
        "mesh.rules={kv_heads: []}",
        "mesh.rules={heads: [], kv_heads: []}",
    ),
    "stream": ("mesh.sequence_parallel=true", "mesh.sequence_parallel=false"),
    "family": ((), LLAMA, ("model.tied_embeddings=false", "model.biases=qkv")),
    "prefetch": ("mesh.fsdp_prefetch=none", "mesh.fsdp_prefetch=carry"),
    "dropout": ("model.dropout=0", "model.dropout=0.1"),
    "microbatches": ("train.num_microbatches=1", "train.num_microbatches=2"),
    "recompute": (
        "memory.recompute=none",
        "memory.recompute=full",
        ("memory.recompute=every_k", "memory.recompute_every=2"),
    ),
    "attention": (
        "model.attention.implementation=reference",
        "model.attention.implementation=blocked",
        "model.attention.implementation=pallas_interpreted",
    ),
}
# Factors that another must be 2 for, so that no pair is thought to be covered where it means nothing.
NEEDED = {"overlap": "tensor", "stream": "tensor", "rules": "tensor", "context attention": "context"}
REFUSED = [
    # overrides, devices, message
    (("mesh.pipe=2",), 8, "mesh.pipe 2 is not supported yet"),
    (("mesh.tensor_overlap=ring", "mesh.sequence_parallel=false"), 8, "mesh.tensor_overlap ring moves parts of seq"),
    (("mesh.tensor=4",), 8, r"key.bias: its dimension 'kv_heads' of 2 is not divisible by the 4 parts"),
    (("mesh.tensor=2", "model.vocabulary_size=97"), 8, r"embedding: its dimension 'vocab' of 97 is not divisible"),
    (("mesh.tensor=2", "data.sequence_length=23"), 8, "data.sequence_length 23 does not divide into the 2 parts"),
    (("mesh.pipe=2", "mesh.context=2", "mesh.context_attention=ring"), 8, "mesh.context_attention ring"),
    (("mesh.context=8", "mesh.context_attention=ring"), 8, "data.sequence_length 24 does not divide into the 16 half"),
    (("mesh.context=8",), 8, "model.attention.num_heads 4 does not divide over the 8 devices"),
    (("mesh.fsdp_prefetch=carry",), 8, "mesh.fsdp_prefetch carry"),
    (
        ("model.attention.implementation=pallas",),
        8,
        "model.attention.implementation pallas cannot be had: .* cpu: needs",
    ),
    (
        ("mesh.context=2", "mesh.context_attention=ring", "model.attention.implementation=pallas_interpreted"),
        8,
        "pallas_interpreted takes whole sequences, and mesh.context_attention ring computes attention in parts",
    ),
    (("mesh.fsdp_prefetch=compiler", "mesh.tensor=2"), 8, "mesh.fsdp_prefetch compiler would pipeline"),
    (("mesh.context=2", "mesh.tensor=2", "mesh.tensor_overlap=xla"), 8, "mesh.tensor_overlap xla leaves communication"),
    (
        ("mesh.context=2", "mesh.tensor=2", "mesh.rules={residual_sequence: [tensor, context]}"),
        8,
        r"mesh.rules place residual_sequence on \['tensor', 'context'\] and sequence on \['context'\]",
    ),
    (("mesh.context=2", "mesh.rules={residual_sequence: []}"), 8, r"mesh.rules place residual_sequence on \[\]"),
    (("mesh.rules={batch: [data]}",), 8, "mesh.rules give the mesh axis 'fsdp' to embed and to no dimension"),
    (("mesh.rules={batch: [fsdp, fsdp]}",), 8, "mesh.rules.batch names the mesh axis 'fsdp' twice"),
    (("mesh.rules={batch: [fsdp]}",), 8, "mesh.rules.batch leaves out 'data'"),
    (("mesh.rules={mlp: [data]}",), 8, "mesh.rules.mlp names the mesh axis 'data', which splits the batch alone"),
    (
        ("mesh.tensor=2", "mesh.tensor_overlap=ring", "mesh.rules={residual_sequence: [context]}"),
        8,
        "mesh.tensor_overlap ring needs residual_sequence split over tensor",
    ),
    (("mesh.rules={mpl: []}",), 8, "mesh.rules: there is no logical axis 'mpl'; there are batch, "),
    (("mesh.rules={mlp: [tensr]}",), 8, "mesh.rules.mlp names the mesh axis 'tensr'; there are data, "),
    (("mesh.rules={vocab: [fsdp]}",), 8, "mesh.rules.vocab names the mesh axis 'fsdp', where vocab cannot go"),
    (("mesh.rules={mlp: []}", "mesh.tensor=2", "mesh.tensor_overlap=ring"), 8, "mesh.tensor_overlap ring needs"),
]


def valid(row):
    chosen = dict(zip(FACTORS, row, strict=True))
    devices = math.prod(2 for axis in AXES if chosen.get(axis) == f"mesh.{axis}=2")
    idle = any(chosen[f] != FACTORS[f][0] and chosen[n] == FACTORS[n][0] for f, n in NEEDED.items())
    zigzag = FACTORS["context attention"][1:]
    refused = chosen["overlap"] == FACTORS["overlap"][2] and chosen["stream"] == FACTORS["stream"][1]
    refused |= chosen["overlap"] == FACTORS["overlap"][2] and chosen["rules"] in FACTORS["rules"][2:]
    refused |= chosen["prefetch"] == FACTORS["prefetch"][1] and chosen["recompute"] != FACTORS["recompute"][1]
    refused |= chosen["overlap"] == FACTORS["overlap"][1] and chosen["context"] == FACTORS["context"][1]
    refused |= chosen["attention"] == FACTORS["attention"][2] and chosen["context attention"] in zigzag
    return 1 < devices <= MAX_DEVICES and not idle and not refused


def pairs(row):
    return set(itertools.combinations(enumerate(row), 2))


def covering_rows():
    """Few rows in which every pair of values that any valid row has occurs."""
    draw = random.Random(0)
    pool = [row for row in (tuple(map(draw.choice, FACTORS.values())) for _ in range(8_000)) if valid(row)]
    uncovered = set().union(*map(pairs, pool))
    rows = []
    while uncovered:
        best = max(pool, key=lambda row: len(pairs(row) & uncovered))
        rows.append(best)
        uncovered -= pairs(best)
    return rows


def flat(row):
    return [override for value in row for override in ((value,) if isinstance(value, str) else value)]


@functools.cache
def initial_state(*overrides):
    return jax.tree.map(np.asarray, build_program(tiny_config(*overrides), jax.devices()[:1]).init())


def gradients(model, overrides, num_devices):
    config = tiny_config(*model, *overrides)
    program = build_program(config, jax.devices()[:num_devices])
    batch = to_devices(random_fields(config), rows_of_process(program.batch_shape), program.batch_shape)
    state = jax.tree.map(lambda leaf, at: jax.device_put(leaf, at.sharding), initial_state(*model), program.state_shape)
    found, sums = jax.jit(program.step.gradients)(state, batch)
    return jax.tree.map(np.asarray, found), float(sums["loss"] / sums["weight"])


@functools.cache
def on_one_device(*model):
    return gradients(model, (), 1)


@pytest.mark.parametrize("row", covering_rows(), ids=lambda row: " ".join(o.split(".")[-1] for o in flat(row)))
def test_loss_and_gradients_are_those_of_one_device(row):
    chosen = dict(zip(FACTORS, row, strict=True))
    model = flat((chosen["family"], chosen["dropout"]))
    devices = math.prod(2 for axis in AXES if chosen.get(axis) == f"mesh.{axis}=2")
    expect_those_of_one_device(model, flat(row), devices)


# On a ring of two, forth is back.
@pytest.mark.parametrize(
    "overrides",
    [
        ("mesh.data=2", "mesh.tensor=4"),
        ("mesh.fsdp=2", "mesh.tensor=4", "memory.recompute=full", "mesh.fsdp_prefetch=carry"),
    ],
)
def test_a_ring_of_four_goes_the_right_way_round(overrides):
    model = (*LLAMA, "model.attention.num_kv_heads=4")
    expect_those_of_one_device(model, ("mesh.tensor_overlap=ring", *overrides), 8)


def expect_those_of_one_device(model, overrides, devices):
    expected, expected_loss = on_one_device(*model)
    found, loss = gradients(model, overrides, devices)
    assert loss == pytest.approx(expected_loss, rel=1e-6)
    # Some gradients are zero but for rounding, as those of key biases are: these are compared with all of them.
    norm = np.sqrt(sum(np.square(leaf).sum() for leaf in jax.tree.leaves(expected)))
    for (path, leaf), other in zip(jax.tree.leaves_with_path(expected), jax.tree.leaves(found), strict=True):
        error = np.linalg.norm(leaf - other) / max(np.linalg.norm(leaf), 1e-3 * norm)
        assert error <= 1e-5, f"{jax.tree_util.keystr(path)}: {error}"


def test_the_rows_hold_every_pair_of_axes_and_some_triples():
    groups = [{a for a in AXES if f"mesh.{a}=2" in row} for row in covering_rows()]
    for pair in itertools.combinations([axis for axis in AXES if axis != "pipe"], 2):
        assert any(set(pair) <= group for group in groups), pair
    assert len({frozenset(group) for group in groups if len(group) == 3}) >= 5


@pytest.mark.parametrize(("overrides", "devices", "message"), REFUSED, ids=lambda value: str(value)[:60])
def test_what_cannot_be_combined_is_refused(overrides, devices, message):
    with pytest.raises(UserError, match=message):
        build_program(tiny_config(*overrides), devices)
