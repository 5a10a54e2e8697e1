"""Kernels compiled without a GPU, ahead of time or in parallel, and where they are kept."""

import tritonllm.kernels.runtime  # noqa: F401 (refuses a Triton that is not supported, before its pieces are missed)
