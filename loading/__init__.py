"""Readers of files: configurations, weights, vocabularies and adapters."""
