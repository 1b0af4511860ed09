"""Accelerator kernels with plain-JAX references. Usable without the rest of this repository."""
