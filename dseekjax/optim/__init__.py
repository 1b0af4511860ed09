"""Optimizers and learning-rate schedules, on optax."""
