"""Which loop runs the layers."""

from collections.abc import Callable
from typing import Any

from dseekjax.memory.config import MemoryConfig
from dseekjax.memory.recompute import scan_layers
from dseekjax.parallel.prefetch import Layer, Prefetch, scan_carrying

LayerLoop = Callable[[Layer, Callable[[Any], Any], Any, Any, Any, Any], tuple[Any, Any]]
"""As `parallel.prefetch.scan_carrying`, whatever it gathers when and keeps."""


def build_layer_loop(prefetch: Prefetch, memory: MemoryConfig, *, is_sharded: bool) -> LayerLoop:
    """The loop for a way to prefetch and what to keep; `is_sharded` is whether parameters are gathered at all."""
    if prefetch == "carry":
        return scan_carrying

    def scan_gathering(
        layer: Layer, gather: Callable[[Any], Any], carry: Any, stacked: Any, per_layer: Any, constants: Any
    ) -> tuple[Any, Any]:
        def gathered_layer(carry: Any, slices: tuple[Any, Any]) -> tuple[Any, Any]:
            params, own = slices
            return layer(carry, gather(params), own, constants)

        return scan_layers(gathered_layer, carry, (stacked, per_layer), memory, regather=is_sharded)

    return scan_gathering
