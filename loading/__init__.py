"""Reads what is on disk: configurations, weights, tokenizers and chat templates."""
