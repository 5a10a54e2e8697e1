"""How a rank meets the others: which group connects it to them."""

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from tritonllm import env
from tritonllm.dist.group import ALONE, ConnectedGroup, Group

MOST_PEERS = 8  # ranks whose GPUs write to each other's memory


def connect(
    store: Any, rank: int, size: int, device: torch.device, *, timeout: float, local: bool, peers: bool = True
) -> Group:
    """Meet the other ranks.

    Args:
        store: a store of torch.distributed that all ranks reach.
        device: CPU for gloo, a CUDA device for NCCL.
        timeout: seconds that a collective may take.
        local: all ranks are on this machine: gloo then needs no name of it.
        peers: GPUs that reach each other's memory sum up by our own kernels, else by NCCL.

    Raises:
        ValueError: torch lacks the backend.
        RuntimeError: the others did not come in time.
    """
    if size == 1:
        return ALONE
    patience = timedelta(seconds=timeout)
    if device.type == "cuda":
        if not dist.is_nccl_available():
            raise ValueError("tensor_parallel_size > 1 on GPUs needs a torch with NCCL")
        env.leave_nccl_errors_to_us()
        nccl = dist.ProcessGroupNCCL.Options()
        nccl._timeout = patience
        backend = dist.ProcessGroupNCCL(store, rank, size, nccl)
        backend.eager_connect_single_device(device)  # not in the first step, and never in a capture
        if not peers or size > MOST_PEERS:
            return ConnectedGroup(backend, device)
        from tritonllm.dist.symmetric import SymmetricGroup  # with the kernels

        return SymmetricGroup(backend, device)
    if not dist.is_gloo_available():
        raise ValueError("tensor_parallel_size > 1 on the CPU needs a torch with gloo")
    gloo: Any = dist.ProcessGroupGloo  # torch's stubs do not know its options
    options = gloo._Options()
    options._timeout = patience
    options._devices = [gloo.create_device(hostname="127.0.0.1") if local else gloo.create_default_device()]
    return ConnectedGroup(gloo(store, rank, size, options), device)
