"""Quantised weights: int8 with a scale per row, and blocks as in GGUF files."""
