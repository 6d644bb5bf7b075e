"""Readers of files: configurations, weights, vocabularies and chat templates."""
