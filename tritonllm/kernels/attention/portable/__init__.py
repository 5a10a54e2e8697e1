"""Attention in plain Triton, for any GPU."""
