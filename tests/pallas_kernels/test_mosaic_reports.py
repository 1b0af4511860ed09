import jax
import jax.numpy as jnp
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.gpus import load_gpu
from pallas_kernels.testing.compiling import compile_for


def multiply_by(factor):
    def kernel(x, out, copied):
        copied[...] = x[...] * factor
        out[...] = copied[...]

    def run(x):
        return plgpu.kernel(
            kernel,
            out_type=jax.ShapeDtypeStruct(x.shape, x.dtype),
            scratch_types=[plgpu.SMEM(x.shape, x.dtype)],
            kernel_name=f"multiply_by_{factor}",
        )(x)

    return run


@pytest.mark.cuda_compiler
def test_kernels_are_reported_on_as_often_as_they_are_compiled():
    shape = jax.ShapeDtypeStruct((1024,), jnp.float32)
    double, triple = multiply_by(2), multiply_by(3)

    def compiled(function):
        return [report for report in compile_for(load_gpu("h100_sxm"), function, shape) if "multiply" in report.name]

    (first,) = compiled(double)
    assert first.name == "multiply_by_2_mosaic_gpu_kernel"
    assert first.threads == 128
    assert first.shared_memory >= 4096
    assert first.registers > 0
    assert (first.spill_bytes, first.tensor_core_instructions) == (0, {})
    # Known to the process by now, whether alone or beside another.
    assert compiled(double) == [first]
    both = compiled(lambda x: triple(double(x)))
    assert both[0] == first
    assert [report.name for report in both[1:]] == ["multiply_by_3_mosaic_gpu_kernel"]
