"""Knowing what is going on: metrics, their writers, the report."""
