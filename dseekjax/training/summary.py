"""What is about to run, in a few lines."""

import importlib.metadata

import jax
from jax.sharding import AbstractMesh

from dseekjax.allocator import allocator_in_force, best_allocator
from dseekjax.models.flops import parameter_count, training_flops_per_token
from dseekjax.parallel.mesh import AnyMesh
from dseekjax.parallel.sharding import bytes_per_device
from dseekjax.platform import compute_threads
from dseekjax.training.program import Program

PACKAGES = ("jax", "flax", "optax", "orbax-checkpoint", "grain")


def summarise(program: Program) -> str:
    """Parameters, work, memory, mesh, devices and versions, a line each."""
    config = program.config
    length, batch = config.data.sequence_length, config.train.global_batch_size
    flops = training_flops_per_token(config.model, length)
    state = bytes_per_device(program.state_shape)
    params = bytes_per_device(program.state_shape.params)
    axes = " x ".join(f"{axis} {size}" for axis, size in program.mesh.shape.items() if size > 1) or "one device"
    lines = {
        "model": f"{config.model.kind}, {config.model.num_layers} layers of width {config.model.embed_dim}, "
        f"{program.attention} attention",
        "parameters": f"{parameter_count(config.model):,}",
        "FLOPs per token": f"{flops:.3g} forward and backward, {flops * length * batch:.3g} per step",
        "batch": f"{batch} sequences of {length} tokens in {config.train.num_microbatches} microbatch(es), "
        f"{config.precision.compute_dtype}",
        "memory": f"{_size(state)} of state per device, {_size(params)} of it parameters; activations come on top",
        "mesh": axes,
        "devices": _devices(program.mesh),
        **_cpu(program),
        "versions": ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("dseekjax", *PACKAGES)),
    }
    return "\n".join(f"{name:<16} {value}" for name, value in lines.items())


def _devices(mesh: AnyMesh) -> str:
    if isinstance(mesh, AbstractMesh):
        return f"{mesh.size}, not there"
    kinds = {device.device_kind for device in mesh.devices.flat}
    return f"{mesh.size} x {' and '.join(sorted(kinds))} in {jax.process_count()} process(es)"


def _cpu(program: Program) -> dict[str, str]:
    if isinstance(program.mesh, AbstractMesh) or program.mesh.devices.flat[0].platform != "cpu":
        return {}
    layers = "layers one by one" if program.unrolls_layers else "a loop over layers"
    line = f"{allocator_in_force()}, {compute_threads()} threads, {layers}; XLA "
    if not program.config.run.tune_cpu:
        return {"on CPU": line + "as it comes, for run.tune_cpu is false"}
    told = ", ".join(f"{name.removeprefix('xla_cpu_')} {value}" for name, value in program.compiler_options.items())
    hint = best_allocator().hint
    return {"on CPU": line + (f"with {told}" if told else "as XLA_FLAGS says"), **({"hint": hint} if hint else {})}


def _size(num_bytes: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.4g} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.4g} TiB"
