"""Kernels as launches need them, to be compared."""

from tritonllm.kernels.compile.parallel import Specialization


def described(kernel: Specialization) -> str:
    """The same for two that are compiled to the same."""
    source = kernel.source
    return str((kernel.name, *(sorted(map(str, d.items())) for d in (source.signature, source.constants)), source.attrs,
                kernel.options))  # fmt: skip
