"""Which loop runs the layers."""

from collections.abc import Callable
from typing import Any

from dseekjax.memory.config import MemoryConfig
from dseekjax.memory.recompute import scan_layers
from dseekjax.parallel.prefetch import Layer, Prefetch, gather_again, scan_carrying

LayerLoop = Callable[[Layer, Callable[[Any], Any], Any, Any, Any, Any], tuple[Any, Any]]
"""As `parallel.prefetch.scan_carrying`, whatever it gathers when and keeps."""


def build_layer_loop(prefetch: Prefetch, memory: MemoryConfig, *, is_sharded: bool) -> LayerLoop:
    """The loop for a way to prefetch and what to keep; `is_sharded` is whether parameters are gathered at all."""
    if prefetch == "carry":
        return scan_carrying

    def scan_gathering(
        layer: Layer, gather: Callable[[Any], Any], carry: Any, stacked: Any, per_layer: Any, constants: Any
    ) -> tuple[Any, Any]:
        def gathering(carry: Any, params: Any, own: Any, constants: Any) -> tuple[Any, Any]:
            return layer(carry, gather(params), own, constants)

        each = gather_again(layer, gather) if is_sharded and memory.recompute == "none" else gathering
        return scan_layers(lambda carry, x: each(carry, x[0], x[1], constants), carry, (stacked, per_layer), memory)

    return scan_gathering
