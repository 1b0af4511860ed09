"""Finding data races of Mosaic kernels, by interpreting them on a CPU with a clock per thread."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call
from jax.experimental.pallas import mosaic_gpu


def has_races(function: Callable[..., Any], *arguments: Any) -> bool:
    """Whether two threads of a Mosaic kernel touch the same memory, one of them writing, with nothing to order them.

    Seen are the warpgroups of one block (a thread each) and the copies that they start; blocks run one after the
    other, and tensor-core products as if each were waited for at once, so a missing `wgmma_wait` is not found.

    Args:
        function: calls one Mosaic kernel, compiled or interpreted by its own choice; each race is logged.
        arguments: arrays.

    Raises:
        ValueError: `function` calls no Mosaic kernel.
    """
    interpret_pallas_call.reset_gpu_interpret_mode_state()
    fields = {field.name for field in dataclasses.fields(mosaic_gpu.InterpretGPUParams)}
    # Before JAX 0.12 a race is only warned of, and there is no word for it.
    warn: dict[str, Any] = {"on_race": "warn"} if "on_race" in fields else {}
    with mosaic_gpu.force_gpu_interpret_mode(mosaic_gpu.InterpretGPUParams(detect_races=True, **warn)):
        # A new function, so that nothing traced outside this mode stands in for it.
        jax.block_until_ready(jax.jit(lambda *arrays: function(*arrays))(*arguments))
    try:
        return bool(interpret_pallas_call.get_races().races_found)
    except AssertionError:
        raise ValueError("has_races: no Mosaic kernel ran; give a function that calls one") from None
