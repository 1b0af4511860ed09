"""The Program (everything jitted) and the Trainer (everything else)."""
