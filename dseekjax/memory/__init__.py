"""Which activations are kept and which are computed again."""
