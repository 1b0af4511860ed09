"""What makes steps on CPU fast leaves losses as they are, and the compiled step does nothing that it need not."""

import re
from collections import Counter

import jax
import numpy as np
import pytest

from dseekjax.parallel import compiler
from dseekjax.training.program import build_program
from dseekjax.training.step import Step
from tests.tiny import random_batch, tiny_config
from tests.training.test_equality import losses

CALL = '"__onednn$matmul"'
BFLOAT16 = "precision.compute_dtype=bfloat16"
UNROLLED = "model.scan_layers=false"
# Large enough that some products go to oneDNN.
SIZES = ("model.vocabulary_size=1024", "model.embed_dim=128", "model.loss_chunk=128")


@pytest.fixture
def onednn_for_all(monkeypatch):
    monkeypatch.setattr(compiler, "ONEDNN_FLOPS", 0.0)


def compiled_text(*overrides):
    program = build_program(tiny_config(*overrides), jax.devices()[:1])
    return program, program.train_step.lower(program.state_shape, program.batch_shape).compile().as_text()


def test_losses_are_those_of_xla_as_it_comes(onednn_for_all):
    assert CALL in compiled_text(UNROLLED, *SIZES)[1]
    expected, expected_evaluation = losses(tiny_config("run.tune_cpu=false", *SIZES), 1)
    found, evaluation = losses(tiny_config(UNROLLED, *SIZES), 1)
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    assert evaluation == pytest.approx(expected_evaluation, rel=1e-5)


def test_what_xla_flags_say_goes_first(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_experimental_onednn_custom_call=false")
    assert CALL not in compiled_text(BFLOAT16, *SIZES)[1]


@pytest.mark.parametrize("microbatches", [1, 4])
def test_sums_over_chunks_and_microbatches_stay_float32(microbatches):
    """oneDNN takes over a sum that stands beside a product, and does it in the product's dtype."""
    _, text = compiled_text(BFLOAT16, *SIZES, "train.global_batch_size=32", f"train.num_microbatches={microbatches}")
    calls = [line for line in text.splitlines() if CALL in line]
    assert calls
    assert not [call for call in calls if "ADD" in call]
    # Nor is it asked for a product of bfloat16 that is wider, with which it was once seen to hang.
    assert not [call for call in calls if re.search(r"= \(?f32", call)]


@pytest.mark.parametrize(("dtype", "allowed"), [("float32", 0), ("bfloat16", 1)])
def test_donated_state_is_not_copied(dtype, allowed):
    """In bfloat16 the sum over chunks of the loss, of the table's shape, is copied once."""
    program, text = compiled_text(f"precision.compute_dtype={dtype}", UNROLLED, *SIZES)
    large = {tuple(leaf.shape) for leaf in jax.tree.leaves(program.state_shape) if leaf.size > 1000}
    copied = Counter(re.findall(r"= f32\[([\d,]+)\]\S* copy\(", text))
    found = sum(count for shape, count in copied.items() if tuple(map(int, shape.split(","))) in large)
    assert found <= allowed
    donated = len(jax.tree.leaves(program.state_shape))
    assert len(re.findall(r"(?:may|must)-alias", text.splitlines()[0])) == donated


def temporary_bytes(*overrides):
    program = build_program(tiny_config(*overrides), jax.devices()[:1])
    compiled = program.train_step.lower(program.state_shape, program.batch_shape).compile()
    return compiled.memory_analysis().temp_size_in_bytes


@pytest.mark.parametrize(("dtype", "limit"), [("float32", 2.5), ("bfloat16", 3.0)])
def test_a_layer_keeps_one_array_of_attentions(dtype, limit):
    """All else that a layer of this width keeps comes to as much again, and bfloat16's copy to half of it."""
    options = (f"precision.compute_dtype={dtype}", UNROLLED, "data.sequence_length=128", "model.max_positions=128")
    two, four = (temporary_bytes(*options, f"model.num_layers={layers}") for layers in (2, 4))
    model, batch = tiny_config(*options).model, tiny_config(*options).train.global_batch_size
    assert (four - two) / 2 < limit * batch * model.attention.num_heads * 128 * 128 * 4


@pytest.mark.parametrize(("dtype", "limit"), [("float32", 1.5), ("bfloat16", 1.85)])
def test_the_loss_has_one_array_of_logits(dtype, limit):
    """And in bfloat16 one of the gradient by them; the rest is the table's gradient."""
    options = (f"precision.compute_dtype={dtype}", UNROLLED, "model.num_layers=1", "model.loss_chunk=1024")
    small, large = (temporary_bytes(*options, f"model.vocabulary_size={size}") for size in (4096, 8192))
    config = tiny_config(*options)
    tokens = config.train.global_batch_size * config.data.sequence_length
    assert large - small < limit * tokens * 4096 * 4


def test_each_parameter_is_cast_once():
    program = build_program(tiny_config(BFLOAT16), jax.devices()[:1])
    jaxpr = jax.make_jaxpr(lambda state, batch: Step.train(program.step, state, batch))(
        program.state_shape, random_batch(program.config)
    )
    # Those of layers; a table's gradient, of the same shape as the table, is cast as well.
    leaves = [leaf.shape for leaf in jax.tree.leaves(program.state_shape.params["runs"])]
    casts = Counter(shape for shape in _casts(jaxpr.jaxpr) if shape in set(leaves))
    assert casts == Counter(leaves)


def _casts(jaxpr):
    """Shapes of what is cast from float32 to bfloat16."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == "convert_element_type":
            (source,), (result,) = equation.invars, equation.outvars
            if (str(source.aval.dtype), str(result.aval.dtype)) == ("float32", "bfloat16"):
                yield source.aval.shape
        for parameter in equation.params.values():
            for inner in parameter if isinstance(parameter, tuple | list) else (parameter,):
                inner = getattr(inner, "jaxpr", inner)
                if hasattr(inner, "eqns"):
                    yield from _casts(inner)


@pytest.mark.parametrize(
    ("overrides", "unrolled"),
    [
        ((), True),
        (("model.num_layers=12",), False),
        (("memory.recompute=full",), False),
        (("mesh.fsdp=2",), False),
        (("model.num_layers=12", UNROLLED), True),
        (("model.scan_layers=true",), False),
    ],
)
def test_which_layers_are_compiled_one_by_one(overrides, unrolled):
    devices = 2 if "mesh.fsdp=2" in overrides else 1
    config = tiny_config("model.scan_layers=auto", *overrides)
    program = build_program(config, jax.devices()[:devices])
    text = program.train_step.lower(program.state_shape, program.batch_shape).as_text()
    layer_kernel = f"tensor<{config.model.num_layers}x32x64xf32>"
    loops = [line for line in text.splitlines() if "stablehlo.while" in line and layer_kernel in line]
    assert (not loops) == unrolled
