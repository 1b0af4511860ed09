"""Tools that prove kernels without a GPU: lowering and compiling for one that is not there, races, numerics."""
