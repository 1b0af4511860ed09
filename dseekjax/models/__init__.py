"""Models as flax.nnx modules with logical axis names. See `decoder` for the contract that a model fulfils."""
