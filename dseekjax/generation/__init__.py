"""Texts that a model writes: sampling, and the loop around the jitted steps."""
