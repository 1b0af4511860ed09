"""Planning: what a config needs on a cluster, found by compiling it for GPUs that are not there."""
