"""Which dtype each part computes in."""
