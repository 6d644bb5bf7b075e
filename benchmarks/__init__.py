"""Measurements that no lesson runs by itself: python -m benchmarks.engine, and so on."""
