"""Several processes as one run: who they are, how they meet, and that they agree."""
