"""Readers of files: configurations, weights, tokenizers and chat templates."""
