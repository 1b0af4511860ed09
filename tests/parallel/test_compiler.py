import jax
import pytest

from dseekjax.config import load_config, recipe_path
from dseekjax.parallel.compiler import ONEDNN, VECTOR_WIDTH, cpu_options, gpu_options, layer_bytes
from dseekjax.parallel.config import MeshConfig
from dseekjax.training import program as room
from dseekjax.training.program import build_program
from tests.tiny import tiny_config

COMBINE = "xla_gpu_all_gather_combine_threshold_bytes"


@pytest.mark.parametrize("prefetch", ["compiler", "carry", "none"])
def test_options_for_gpus_follow_the_mesh(prefetch):
    options = gpu_options(MeshConfig(tensor_overlap="xla"), prefetch, 1000)
    assert options["xla_gpu_threshold_for_windowed_einsum_mib"] == 0
    assert ("optimization_level" in options) == (prefetch == "compiler")
    assert options.get(COMBINE) == (None if prefetch == "none" else 1000)
    assert "xla_gpu_threshold_for_windowed_einsum_mib" not in gpu_options(MeshConfig(), prefetch, 1000)


def test_onednn_is_for_bfloat16_and_for_long_steps():
    assert cpu_options("float32", 1e9) == VECTOR_WIDTH
    assert cpu_options("float32", 1e11) == cpu_options("bfloat16", 1e9) == VECTOR_WIDTH | ONEDNN


def test_options_reach_the_program_by_the_platform_of_its_devices(monkeypatch):
    seen = {}
    real = jax.jit

    def jit(function, **arguments):
        seen[function.__name__] = arguments.get("compiler_options")
        return real(function, **arguments)

    monkeypatch.setattr(jax, "jit", jit)
    for config, devices, expected in (
        (tiny_config(), jax.devices(), VECTOR_WIDTH),
        (tiny_config("precision.compute_dtype=bfloat16"), jax.devices(), VECTOR_WIDTH | ONEDNN),
        (tiny_config("run.tune_cpu=false"), jax.devices(), {}),
        (tiny_config(), 8, {}),
    ):
        program = build_program(config, devices)
        assert seen["train"] == seen["evaluate"] == program.compiler_options == expected
    assert room._compiler_options(tiny_config(), "gpu", program.mesh, "none", program.state_shape) == gpu_options(
        MeshConfig(), "none", 0
    )


@pytest.mark.parametrize(("mesh", "parts"), [((), 1), (("mesh.fsdp=8", "mesh.tensor=8"), 8)])
def test_bytes_of_a_gathered_layer(mesh, parts):
    program = build_program(load_config(recipe_path("llama3_8b"), mesh), 64)
    kernels = 4096 * (2 * 4096 + 2 * 1024 + 3 * 14336)
    assert layer_bytes(program.state_shape.params["runs"].values(), 2) == 2 * (kernels // parts + 2 * 4096)
