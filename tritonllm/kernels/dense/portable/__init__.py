"""Products in plain Triton, for any GPU."""
