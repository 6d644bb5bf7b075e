"""Structured output: choices."""
