"""Reads what is on disk: configurations, weights and tokenizers."""
