"""Products of experts in plain Triton, for any GPU."""
