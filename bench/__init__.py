"""Benchmarks. ``python -m bench.kernels`` measures the kernels; results lie in ``results``."""
