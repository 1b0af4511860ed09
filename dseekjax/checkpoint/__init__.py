"""Saving and restoring a run."""
