import jax
import pytest

from dseekjax.config import load_config, recipe_path
from dseekjax.parallel.compiler import compiler_options, layer_bytes
from dseekjax.parallel.config import MeshConfig
from dseekjax.training.program import build_program
from tests.tiny import tiny_config

COMBINE = "xla_gpu_all_gather_combine_threshold_bytes"


@pytest.mark.parametrize("prefetch", ["compiler", "carry", "none"])
def test_only_gpus_get_options(prefetch):
    config = MeshConfig(tensor_overlap="xla")
    assert compiler_options("cpu", config, prefetch, 1000) == {}
    options = compiler_options("gpu", config, prefetch, 1000)
    assert options["xla_gpu_threshold_for_windowed_einsum_mib"] == 0
    assert ("optimization_level" in options) == (prefetch == "compiler")
    assert options.get(COMBINE) == (None if prefetch == "none" else 1000)
    assert "xla_gpu_threshold_for_windowed_einsum_mib" not in compiler_options("gpu", MeshConfig(), prefetch, 1000)


def test_options_reach_the_program_by_the_platform_of_its_devices(monkeypatch):
    seen = {}
    real = jax.jit

    def jit(function, **arguments):
        seen[function.__name__] = arguments.pop("compiler_options", None)
        return real(function, **arguments)

    monkeypatch.setattr(jax, "jit", jit)
    for devices in (jax.devices(), 8):
        build_program(tiny_config(), devices)
        assert seen["train"] == seen["evaluate"] == {}
    monkeypatch.setattr("dseekjax.training.program.compiler_options", lambda platform, *_: {"asked for": platform})
    build_program(tiny_config(), jax.devices())
    assert seen["train"] == seen["evaluate"] == {"asked for": "cpu"}


@pytest.mark.parametrize(("mesh", "parts"), [((), 1), (("mesh.fsdp=8", "mesh.tensor=8"), 8)])
def test_bytes_of_a_gathered_layer(mesh, parts):
    program = build_program(load_config(recipe_path("llama3_8b"), mesh), 64)
    kernels = 4096 * (2 * 4096 + 2 * 1024 + 3 * 14336)
    assert layer_bytes(program.state_shape.params["runs"].values(), 2) == 2 * (kernels // parts + 2 * 4096)
