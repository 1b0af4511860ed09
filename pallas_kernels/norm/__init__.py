"""RMS norm and layer norm, plain JAX forward, with one kernel each for the gradient."""

from pallas_kernels.norm.api import EXAMPLES, IMPLEMENTATIONS, NormCase, layer_norm, rms_norm

__all__ = ["EXAMPLES", "IMPLEMENTATIONS", "NormCase", "layer_norm", "rms_norm"]
