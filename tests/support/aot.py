"""What every kernel must satisfy after compilation for a chip: checked without one."""

from tritonllm.kernels.aot import SHARED_MEMORY_LIMIT, Arch, CompiledKernel

ARCHS = (80, 90, 100, "gfx942")


def has_float8(arch: Arch) -> bool:
    """Converts float8_e4m3fn, or its launchers raise. AMD's MI300 has another format, with one NaN and one zero."""
    return isinstance(arch, int) and arch >= 89


def assert_resources(kernels: list[CompiledKernel]) -> None:
    """Something was compiled, it fits the chip's shared memory, and no register was spilled.

    Of kernels for AMD's GPUs only that they compile: nobody has tuned them for those, nor measured them there.
    """
    assert kernels, "nothing was compiled"
    for kernel in {id(kernel.asm): kernel for kernel in kernels}.values():  # not each launch of the same one
        if isinstance(kernel.arch, str):
            continue
        what = f"{kernel.name} for sm_{kernel.arch} ({kernel.num_warps} warps, {kernel.num_stages} stages)"
        limit = SHARED_MEMORY_LIMIT[kernel.arch]
        assert kernel.shared_bytes <= limit, f"{what}: {kernel.shared_bytes} bytes of shared memory > {limit}"
        registers, spilled = kernel.resource_usage()
        assert spilled == 0, f"{what}: {spilled} bytes of registers spilled ({registers} registers)"


def assert_sass(kernels: list[CompiledKernel], instruction: str, name: str) -> None:
    """Every compiled kernel called `name` uses `instruction` (HGMMA is Hopper's matrix product)."""
    found = [kernel for kernel in kernels if kernel.name == name]
    assert found, f"{name} was not compiled; compiled: {sorted({k.name for k in kernels})}"
    for kernel in found:
        assert instruction in kernel.sass, f"{name} for sm_{kernel.arch} has no {instruction}"
