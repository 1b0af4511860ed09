"""From files to global batches: batch `i` is a pure function of corpora, seed, mixture and `i`."""
