"""Quantised weights: int8 with a scale per row."""
