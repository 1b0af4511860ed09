"""What XLA for H100 makes of operations along rows: bytes read and written beside the least there could be."""

import jax
import jax.numpy as jnp
import pytest

from dseekjax.models.layers.rotary import rotate
from dseekjax.plan.hlo import parse_hlo
from pallas_kernels.compile_only import compile_only_devices
from pallas_kernels.gpus import load_gpu
from pallas_kernels.testing.lowering import lower_for

pytestmark = pytest.mark.cuda_compiler
BYTES = {"bf16": 2, "f32": 4, "s32": 4}
TOKENS, WIDTH = (4, 4096), 4096


def normed(x, scale):
    wide = x.astype(jnp.float32)
    return (wide * jax.lax.rsqrt(jnp.square(wide).mean(-1, keepdims=True) + 1e-5) * scale).astype(x.dtype)


def layer_normed(x, scale, bias):
    wide = x.astype(jnp.float32)
    centred = wide - wide.mean(-1, keepdims=True)
    normal = centred * jax.lax.rsqrt(jnp.square(centred).mean(-1, keepdims=True) + 1e-5)
    return (normal * scale + bias).astype(x.dtype)


def gradient(function, differentiated):
    def run(*arguments):
        inputs, others, upstream = arguments[:differentiated], arguments[differentiated:-1], arguments[-1]
        return jax.vjp(lambda *x: function(*x, *others), *inputs)[1](upstream)

    return run


def array(*shape, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(shape, dtype)


X, SCALE, HIDDEN = array(*TOKENS, WIDTH), array(WIDTH, dtype=jnp.float32), array(*TOKENS, 11008)
HEADS, POSITIONS = array(*TOKENS, 32, 128), array(*TOKENS, dtype=jnp.int32)


def turned(x, positions):
    return rotate(x, positions, 1e4)


def gated(gate, up):
    return jax.nn.silu(gate) * up


@pytest.mark.parametrize(
    ("function", "arguments", "ratio"),
    [
        (normed, (X, SCALE), 1.00),
        (gradient(normed, 2), (X, SCALE, X), 1.68),
        (layer_normed, (X, SCALE, SCALE), 1.00),
        (gradient(layer_normed, 3), (X, SCALE, SCALE, X), 3.35),
        (turned, (HEADS, POSITIONS), 1.06),
        # Two of the three arrays are enough.
        (gradient(turned, 1), (HEADS, POSITIONS, HEADS), 0.71),
        (gated, (HIDDEN, HIDDEN), 1.00),
        (gradient(gated, 2), (HIDDEN, HIDDEN, HIDDEN), 1.00),
        (gradient(jax.nn.gelu, 1), (HIDDEN, HIDDEN), 1.00),
    ],
    ids=[
        "RMS norm",
        "its gradient",
        "layer norm",
        "gradient of layer norm",
        "rotary",
        "gradient of rotary",
        "swiglu",
        "gradient of swiglu",
        "gradient of gelu",
    ],
)
def test_bytes_moved_to_the_least(function, arguments, ratio):
    gpu = load_gpu("h100_sxm")
    sharding = jax.sharding.SingleDeviceSharding(compile_only_devices(gpu.target_config)[0])
    placed = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding) for x in arguments]
    module = parse_hlo(lower_for(gpu, function, *placed).compile().as_text())
    entry = module.computations[module.entry]
    moved = 0
    for instruction in entry.instructions:
        if instruction.opcode == "fusion":
            operands = [entry.operand(instruction, place).arrays for place in range(len(instruction.operands))]
            for arrays in (instruction.arrays, *operands):
                moved += sum(BYTES[x.dtype] * x.size for x in arrays)
    results = jax.tree.leaves(jax.eval_shape(function, *arguments))
    least = sum(x.size * x.dtype.itemsize for x in (*arguments, *results))
    assert moved / least == pytest.approx(ratio, abs=0.03)
