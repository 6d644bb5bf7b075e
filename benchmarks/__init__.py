"""Benchmarks to run by hand, such as python -m benchmarks.engine."""
