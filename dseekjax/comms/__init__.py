"""What crosses the wire between replicas."""
