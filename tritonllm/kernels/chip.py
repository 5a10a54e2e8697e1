"""What a launcher asks about the GPU that it launches on, or compiles for."""

import torch
from triton.runtime import driver

from tritonllm import env


def processors(device: torch.device) -> int:
    """Multiprocessors; an H200's where there is no GPU."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 132


def on_sm90(device: torch.device) -> bool:
    """A Hopper GPU, whose Gluon kernels no other runs."""
    if device.type == "cpu" and env.CPU_BACKEND != "compile":
        return False
    try:
        target = driver.active.get_current_target()
    except RuntimeError:  # there is no driver, so nothing will be launched: the tuner asks for keys
        return False
    return bool(target.backend == "cuda" and target.arch == 90)


def on_amd(device: torch.device) -> bool:
    """A GPU of AMD, which knows no register limit and no dependent launch."""
    if device.type == "cpu" and env.CPU_BACKEND != "compile":
        return False
    return bool(driver.active.get_current_target().backend == "hip")
