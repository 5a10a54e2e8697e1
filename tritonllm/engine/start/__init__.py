"""From a configuration to an engine's parts: devices, sizes, weights, compiled kernels."""
