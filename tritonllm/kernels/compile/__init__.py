"""Kernels compiled without a GPU, ahead of time or in parallel, and where they are kept."""
