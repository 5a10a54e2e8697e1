"""Programmatic dependent launch: a kernel starts while the one before it on the stream still runs.

Between two kernels of a stream the chip drains and fills again, which for the short kernels of a decode step is a
quarter of the time. On Hopper and later a kernel launched with ``launch_pdl`` may start as soon as all programs of the
one before have called :func:`let_next_start` (or ended): its programs take the free places of the processors and wait
in :func:`wait_for_previous` until the kernel before has ended and what it wrote is visible. (CUDA C++ Programming
Guide, "Programmatic Dependent Launch and Synchronization".) A captured graph keeps this.

The rules, for every kernel that is launched so:

- Before :func:`wait_for_previous` read only what no kernel in flight writes (weights), and write nothing: neither the
  inputs are there yet, nor have the readers of the memory behind an output ended.
- At least one program calls :func:`wait_for_previous`. So the end of a kernel implies the end of all before it, and the
  next one needs to wait for this one only.

Any kernel, aware of this or not, may come before and after. On other chips and in the interpreter nothing happens.
"""

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tritonllm.kernels.runtime.chip import chip_of

MAX_PROGRAMS = 4096


@triton.jit
def let_next_start(PDL: tl.constexpr):
    """The next kernel may start, once all programs have come here. (It still waits for the end of this one.)"""
    if PDL:
        gdc_launch_dependents()


@triton.jit
def wait_for_previous(PDL: tl.constexpr):
    """Wait for the end of the kernels before this one; then their results can be read and their inputs overwritten."""
    if PDL:
        gdc_wait()


def has_dependent_launch(device: torch.device) -> bool:
    """Whether the chip behind ``device`` can; for meta tensors and ahead-of-time compilation, the driver's target."""
    chip = chip_of(device)
    return chip is not None and isinstance(chip.arch, int) and chip.arch >= 90


def dependent_launch(device: torch.device, programs: int = 0) -> dict[str, bool]:
    """Keywords of a launch: the kernel's constexpr ``PDL``, and where the chip can, Triton's option.

    Args:
        programs: how many the launch has. An H200 starts them at 1.2 ns each with this option and at 0.65 without: a
            kernel with many small programs says so, and goes without where that would be its time.
    """
    few = programs <= MAX_PROGRAMS
    return {"PDL": True, "launch_pdl": True} if few and has_dependent_launch(device) else {"PDL": False}
