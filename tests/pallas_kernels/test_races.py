import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.testing.races import has_races


@pytest.mark.parametrize("waits", [True, False])
def test_a_barrier_that_is_not_waited_for_is_found(waits):
    def kernel(x, out, shared, filled):
        @pl.when(lax.axis_index("warpgroup") == 0)
        def fill():
            shared[...] = x[...]
            plgpu.barrier_arrive(filled)

        @pl.when(lax.axis_index("warpgroup") == 1)
        def use():
            if waits:
                plgpu.barrier_wait(filled)
            out[...] = shared[...] + 1.0

    run = plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct((128,), jnp.float32),
        scratch_types=[plgpu.SMEM((128,), jnp.float32), plgpu.Barrier()],
        num_threads=2,
        thread_name="warpgroup",
    )
    assert has_races(run, jnp.ones(128)) != waits


def test_a_function_without_a_kernel_has_no_answer():
    with pytest.raises(ValueError, match="no Mosaic kernel ran"):
        has_races(jnp.sin, jnp.ones(128))
