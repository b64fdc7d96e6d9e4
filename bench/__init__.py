"""Benchmarks and checks that need more than a test may ask: `python -m bench.calls`, `python -m
bench.gpu.check`.
"""
