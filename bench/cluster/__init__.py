"""A seeded simulation of many GPUs behind routers; ``python -m bench.cluster``."""
