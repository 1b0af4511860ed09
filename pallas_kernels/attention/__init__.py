"""Scaled dot-product attention: one public function, several implementations."""

from pallas_kernels.attention.api import attention, choose_implementation

__all__ = ["attention", "choose_implementation"]
