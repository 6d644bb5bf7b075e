"""Readers of files: configurations, weights and vocabularies."""
