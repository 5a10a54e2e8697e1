"""Modules that own weights and call kernels: linear, attention, norms, experts, the residual stream."""
