"""Helpers that the benchmarks share."""
