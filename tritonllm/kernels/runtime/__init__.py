"""What every kernel stands on: operators, launch configurations, the chip, checks, random numbers."""

from tritonllm.kernels.runtime import releases

releases.adapt()  # before any kernel is defined: every module that has one imports from this package
