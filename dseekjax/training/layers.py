"""Which loop runs the layers."""

from collections.abc import Callable
from typing import Any

from dseekjax.errors import UserError
from dseekjax.memory.config import MemoryConfig
from dseekjax.memory.recompute import scan_layers
from dseekjax.models.config import ModelConfig
from dseekjax.parallel.prefetch import Layer, Prefetch, gather_again, scan_carrying

LayerLoop = Callable[[Layer, Callable[[Any], Any], Any, Any, Any, Any], tuple[Any, Any]]
"""As `parallel.prefetch.scan_carrying`, whatever it gathers when and keeps."""

MAX_UNROLLED = 8
"""Layers that `auto` compiles one by one.

On two cores a step of 4 layers of width 128, or 6 of 384, was 1.03 to 1.12 times as fast as with a loop; one of GPT-2
124M's 12 layers 0.97 times, took twice as long to compile and a fifth more memory.
"""


def unrolls_layers(model: ModelConfig, platform: str, *, keeps_activations: bool, is_sharded: bool) -> bool:
    """What `model.scan_layers` comes to.

    Raises:
        UserError: layers are not to be looped over where only a loop can do what else is asked for.
    """
    if model.scan_layers == "auto":
        return platform == "cpu" and keeps_activations and not is_sharded and model.num_layers <= MAX_UNROLLED
    if not model.scan_layers and not keeps_activations:
        raise UserError(
            "model.scan_layers false does not go with memory.recompute, which works on a loop; set it to auto, or "
            "memory.recompute to none"
        )
    if not model.scan_layers and is_sharded:
        raise UserError(
            "model.scan_layers false does not go with parameters sharded over a mesh axis, which a loop gathers; set "
            "it to auto, or mesh.fsdp to 1"
        )
    return not model.scan_layers


def build_layer_loop(prefetch: Prefetch, memory: MemoryConfig, *, unrolled: bool, is_sharded: bool) -> LayerLoop:
    """The loop for a way to prefetch and what to keep; `is_sharded` is whether parameters are gathered at all."""
    if prefetch == "carry":
        return scan_carrying

    def scan_gathering(
        layer: Layer, gather: Callable[[Any], Any], carry: Any, stacked: Any, per_layer: Any, constants: Any
    ) -> tuple[Any, Any]:
        def gathering(carry: Any, params: Any, own: Any, constants: Any) -> tuple[Any, Any]:
            return layer(carry, gather(params), own, constants)

        each = gather_again(layer, gather) if is_sharded and memory.recompute == "none" else gathering
        return scan_layers(
            lambda carry, x: each(carry, x[0], x[1], constants), carry, (stacked, per_layer), memory, unrolled
        )

    return scan_gathering
