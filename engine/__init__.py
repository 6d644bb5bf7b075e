"""Continuous batching in which each request gets the output of its own run of `generate`."""
