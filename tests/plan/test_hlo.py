"""The text of programs, read by two parsers."""

import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jaxlib import _hlo

from dseekjax.plan.hlo import bits_of, parse_hlo
from dseekjax.plan.work import Work
from tests.conftest import REPOSITORY


def compiled_text():
    mesh = jax.make_mesh((8,), ("fsdp",), axis_types=(jax.sharding.AxisType.Auto,))

    def program(x, w):
        def layer(x, w):
            x = jnp.tanh(x @ jax.lax.with_sharding_constraint(w, P()))
            return jax.lax.cond(x[0, 0] > 0, jnp.sin, jnp.cos, x), x.sum()

        return jax.lax.scan(layer, x, w)

    with jax.set_mesh(mesh):
        x = jax.ShapeDtypeStruct((16, 8), jnp.bfloat16, sharding=NamedSharding(mesh, P("fsdp")))
        w = jax.ShapeDtypeStruct((6, 8, 8), jnp.bfloat16, sharding=NamedSharding(mesh, P(None, "fsdp")))
        return jax.jit(program).lower(x, w).compile().as_text()


def texts():
    yield pytest.param(compiled_text, id="compiled")
    for path in sorted((REPOSITORY / "tests" / "plan" / "hlo").glob("*.hlo")):
        yield pytest.param(path.read_text, id=path.stem)


@pytest.mark.parametrize("text", list(texts()))
def test_agrees_with_the_parser_of_xla(text):
    ours, theirs = parse_hlo(text()), _hlo.hlo_module_from_text(text())
    computations = {computation.name: computation for computation in theirs.computations()}
    # XLA wraps what is written as started, once it has read it.
    assert set(ours.computations) == {name for name in computations if name != "async_wrapped"}
    for name, computation in ours.computations.items():
        instructions = {instruction.name: instruction for instruction in computations[name].instructions()}
        assert set(computation.by_name) == set(instructions)
        for instruction in computation.instructions:
            other = instructions[instruction.name]
            assert instruction.operands == tuple(operand.name for operand in other.operands())
            written = re.sub(r"/\*.*?\*/", "", f"{instruction.type} {instruction.opcode}(")
            # XLA writes the start of a wrapped collective as that of the collective.
            assert written.replace(" async-start(", " reduce-scatter-start(").replace(
                " async-done(", " reduce-scatter-done("
            ) in re.sub(r"/\*.*?\*/", "", other.to_string())


def test_attributes_stand_outside_of_strings():
    module = parse_hlo((REPOSITORY / "tests" / "plan" / "hlo" / "loop.hlo").read_text())
    gather = module.computations["inner_body"].by_name["gather"]
    assert gather.attribute("channel_id") == "1"
    assert gather.attribute("dimensions") == "{1}"
    assert gather.attribute("nothing") is None
    assert [array.num_bytes for array in gather.arrays] == [64 * 4 * 2, 64 * 32 * 2]
    assert module.num_partitions == 16
    product = module.computations["inner_body"].by_name["product"]
    assert product.backend_config["fusion_backend_config"]["kind"] == "__triton_nested_gemm_fusion"


def test_widths():
    types = {"pred": 8, "s4": 4, "bf16": 16, "f32": 32, "f8e4m3fn": 8, "f4e2m1fn": 4, "c64": 64, "u64": 64, "token": 0}
    assert {name: bits_of(name) for name in types} == types


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no HloModule line"),
        ("HloModule m\n", "no ENTRY"),
        (
            "HloModule m\n\nENTRY %main (p: f32[]) -> f32[] {\n  nonsense\n}\n",
            "cannot read this line of HLO: +nonsense",
        ),
        ("HloModule m\n\nENTRY %main (p: f32[]) -> f32[] {\n  ROOT %p = f32[] add(%x, {\n}\n", "not closed"),
    ],
)
def test_what_is_no_hlo_is_refused(text, message):
    with pytest.raises(ValueError, match=message):
        parse_hlo(text)


def kernels(operand, call):
    """The kernel and FLOPs of a call on one operand."""
    module = parse_hlo(
        f"HloModule m\n\nENTRY %main (p: {operand}) -> f32[] {{\n  %p = {operand} parameter(0)\n{call}\n}}\n"
    )
    main = module.computations["main"]
    work = Work(module)
    return work.kernel(main, main.root), dict(work.of_instruction(main, main.root))


def custom_call(result, operands, target, config="{}"):
    return f'  ROOT %c = {result} custom-call({operands}), custom_call_target="{target}", backend_config={config}'


@pytest.mark.parametrize(("suffix", "products"), [("", 2), ("Backward", 5)])
@pytest.mark.parametrize(("mask", "seen"), [("NO_MASK", 1), ("CAUSAL", 0.5)])
def test_attention_of_cudnn_is_named_and_counted(suffix, products, mask, seen):
    config = f'{{"mask_type":"{mask}","intermediate_tensor_shape":{{"dimensions":["2","8","128","256"]}}}}'
    call = custom_call(
        "(bf16[2,8,128,64], u8[0])",
        "%p, %p, %p",
        f"__cudnn$fmhaSoftmax{suffix}",
        f'{{"cudnn_fmha_backend_config":{config}}}',
    )
    name, flops = kernels("bf16[2,8,128,64]", call)
    assert name == f"cudnn attention {'backward' if suffix else 'forward'}"
    assert flops == {"bf16": products * seen * 2 * 2 * 8 * 128 * 256 * 64}


def test_matrix_products_of_libraries_are_named_and_counted():
    config = '{"gemm_backend_config":{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"]}}}'
    matmul = custom_call("(bf16[256,128], s8[33554432])", "%p, %p", "__cublas$lt$matmul$f8", config)
    assert kernels("f8e4m3fn[256,512]", matmul) == ("cublasLt fp8 matmul", {"f8e4m3fn": 2 * 256 * 128 * 512})
    assert kernels("f32[8]", custom_call("f32[]", "%p", "mosaic_gpu_v2")) == ("custom call mosaic_gpu_v2", {})
    convolution = "  ROOT %c = f32[2,8,8,5] convolution(%p, %p), window={size=3x3}, dim_labels=b01f_01io->b01f"
    assert kernels("f32[3,3,4,5]", convolution)[1] == {"f32": 2 * (2 * 8 * 8 * 5) * (3 * 3 * 4)}


def test_elements_that_are_named_with_their_tuple():
    text = """HloModule m, is_scheduled=true

ENTRY %main (p: (f32[4], (bf16[2,3], s32[]))) -> bf16[2,3] {
  %p = (f32[4]{0}, (bf16[2,3]{1,0}, /*index=1*/s32[])) parameter(0)
  ROOT %copy = bf16[2,3]{1,0} copy(%p#1#0)
}
"""
    main = parse_hlo(text).computations["main"]
    (array,) = main.operand_arrays(main.root)
    assert (array.dtype, array.dimensions) == ("bf16", (2, 3))
    element = main.operand(main.root, 0)
    assert (element.opcode, element.attribute("index")) == ("get-tuple-element", "0")
    with pytest.raises(ValueError, match="uses %q and does not define it"):
        parse_hlo(text.replace("%p#1#0", "%q")).computations["main"].by_name  # noqa: B018
