"""Tensor parallelism over processes that torchrun starts."""
