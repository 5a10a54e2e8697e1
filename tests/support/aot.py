"""What every kernel must satisfy after compilation for a chip: checked without one."""

import re
from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest

from support.examples import is_quick
from tritonllm.kernels.compile import aot
from tritonllm.kernels.compile.aot import Arch, CompiledKernel
from tritonllm.kernels.runtime import releases
from tritonllm.kernels.runtime.chip import SHARED_MEMORY

ARCHS = (80, 89, 90, 100, 120, "gfx942")
# All launches of a test are compiled for Hopper, which the tables are tuned on. Elsewhere the same source becomes other
# machine code in one step of the compiler: each kernel's first launch and every third one; for AMD's GPUs, of which
# only is asked that kernels compile, the first. All of them for all took 20 minutes of one core. With a newer Triton
# than the tables are for, too, only that is asked.
FIRST = 1000
EVERY = (
    {90: 1, 80: 3, 89: 3, 100: 3, 120: 3, "gfx942": FIRST} if releases.TRITON == (3, 6) else dict.fromkeys(ARCHS, FIRST)
)
# Kernels that spill registers from a release of Triton on. From 3.7 on the loop over keys of balanced_kernel is not
# pipelined: 22 KB of shared memory instead of 72 (64 sequences, 128 wide), and up to 1012 bytes spilled on sm_90.
# segments_kernel has two accumulators where a prompt may be longer than a segment, of which one waits while the loops
# over keys run; test_invariant.py asks of those for decodes that they spill nothing.
# Nobody has tuned or measured anything on these: a kernel must fit their shared memory, and may spill a few registers.
SPILLED_UNMEASURED = {89: 128, 120: 128}
SPILLS_FROM = {"balanced_kernel": (3, 7), "_segments_kernel": (3, 6)}


def each_arch(which: Callable[[Arch], bool] = lambda arch: True) -> pytest.MarkDecorator:
    """A case for each chip, of which only Hopper's runs in `make test`."""
    cases = [pytest.param(arch, marks=() if arch == 90 else pytest.mark.long) for arch in ARCHS if which(arch)]
    return pytest.mark.parametrize("arch", cases)


def every_of(arch: Arch) -> int:
    """Of each kernel's launches the first and every so many-th are compiled: as ``EVERY`` says, or a third."""
    return max(EVERY[arch], 3 if is_quick() else 1)


def compile_kernels(arch: Arch, every: int | None = None) -> AbstractContextManager[list[CompiledKernel]]:
    """As :func:`tritonllm.kernels.compile.aot.compile_kernels`, for as many launches as :func:`every_of` says."""
    return aot.compile_kernels(arch, every=every or every_of(arch))


def is_nvidia(arch: Arch) -> bool:
    return isinstance(arch, int)


def has_float8(arch: Arch) -> bool:
    """Converts float8_e4m3fn, or its launchers raise. AMD's MI300 has another format, with one NaN and one zero.

    float8_e5m2 is converted everywhere, but Triton 3.6 chooses the instructions once a process, by the first chip that
    it compiles for: where several chips take turns, ask here, too.
    """
    return isinstance(arch, int) and arch >= 89


def assert_resources(kernels: list[CompiledKernel], most_spilled: int = 0) -> None:
    """Something was compiled, it fits the chip's shared memory, and no register was spilled but for ``SPILLS_FROM``, or
    at most so many bytes of registers.

    Of kernels for AMD's GPUs only that they compile: nobody has tuned them for those, nor measured them there.
    """
    assert kernels, "nothing was compiled"
    for kernel in {id(kernel.asm): kernel for kernel in kernels}.values():  # not each launch of the same one
        if isinstance(kernel.arch, str):
            continue
        what = f"{kernel.name} for sm_{kernel.arch} ({kernel.num_warps} warps, {kernel.num_stages} stages)"
        limit = SHARED_MEMORY[kernel.arch]
        assert kernel.shared_bytes <= limit, f"{what}: {kernel.shared_bytes} bytes of shared memory > {limit}"
        spills_from = SPILLS_FROM.get(kernel.name)
        if spills_from is not None and spills_from <= releases.TRITON:
            continue
        registers, spilled = kernel.resource_usage()
        most = max(most_spilled, SPILLED_UNMEASURED.get(kernel.arch, 0))
        assert spilled <= most, f"{what}: {spilled} bytes of registers spilled ({registers} registers)"


def assert_sass(kernels: list[CompiledKernel], instruction: str, name: str) -> None:
    """Every compiled kernel called `name` uses `instruction` (HGMMA is Hopper's matrix product)."""
    found = [kernel for kernel in kernels if kernel.name == name]
    assert found, f"{name} was not compiled; compiled: {sorted({k.name for k in kernels})}"
    for kernel in found:
        assert instruction in kernel.sass, f"{name} for sm_{kernel.arch} has no {instruction}"


_INSTRUCTION = re.compile(r"(?:@!?U?P\d+\s+)?([A-Z][A-Z0-9_.]*)\s+(.*?);?$")
_REGISTER = re.compile(r"[-|]?R(\d+)")


def uneven_sums(sass: str) -> int:
    """How many multiply-adds add what a shuffle between the threads of a warp has just brought.

    Such a sum is rounded after the exchange in one thread and before it in the other: they end with different sums.
    """
    brought: set[str] = set()
    count = 0
    for line in sass.splitlines():
        found = _INSTRUCTION.match(line.split("\t")[-1].strip())
        if not found:
            continue
        name, operands = found[1], [part.strip() for part in found[2].split(",")]
        registers = [m[1] if (m := _REGISTER.match(operand)) else "" for operand in operands]
        if name.startswith("SHFL"):
            brought.update(registers[1:2])  # the first operand is a predicate
            continue
        count += name.startswith(("FFMA", "DFMA", "HFMA")) and len(registers) > 3 and registers[3] in brought
        brought.discard(registers[0])
    return count


def assert_uniform_sums(kernels: list[CompiledKernel], names: set[str]) -> None:
    """In the kernels with these names, all of which were compiled, every thread gets the same sums."""
    assert names <= {kernel.name for kernel in kernels}
    for kernel in kernels:
        if kernel.name in names:
            assert uneven_sums(kernel.sass) == 0, f"{kernel.name}: threads of a warp add in different ways"
