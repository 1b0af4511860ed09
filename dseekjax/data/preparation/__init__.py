"""From documents to a corpus on disk: in parallel, in constant memory, and the same whatever stopped it on the way."""
