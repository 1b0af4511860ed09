"""The parts that model families are put together from."""
