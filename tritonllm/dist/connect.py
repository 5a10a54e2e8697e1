"""How a rank meets the others: which group connects it to them."""

import socket
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
        local: all ranks are on this machine. Else gloo connects by the network device that ``GLOO_SOCKET_IFNAME``
            names, or by that which leads to the store.
        peers: GPUs that reach each other's memory sum up by our own kernels, else by NCCL.

    Raises:
        ValueError: torch lacks the backend.
        OSError: the store's host has no address that leads there.
        RuntimeError: the others did not come in time, or there is no such network device.
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
    options._devices = [_gloo_device(gloo, store, local)]
    return ConnectedGroup(gloo(store, rank, size, options), device)


def local_store() -> tuple[dist.TCPStore, int]:
    """A store at which processes of this machine meet, and its port: a free one, open to this machine only."""
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    how: dict[str, Any] = {"is_master": True, "wait_for_workers": False}
    return dist.TCPStore("127.0.0.1", port, **how, master_listen_fd=listener.detach()), port


def _gloo_device(gloo: Any, store: Any, local: bool) -> Any:
    """Where this rank listens, and what it tells the others to connect to. gloo's own default is the address of this
    machine's name, which is that of the loopback device on many, so that nobody else can connect to it."""
    if local:
        return gloo.create_device(hostname="127.0.0.1")
    interface = env.gloo_interface()
    if interface is not None:
        return gloo.create_device(interface=interface)
    address = address_of(store)
    return gloo.create_default_device() if address is None else gloo.create_device(hostname=_own_address(*address))


def address_of(store: Any) -> tuple[str, int] | None:
    """The host and the port of a store; ``None`` if it is not on a network."""
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return (store.host, store.port) if isinstance(store, dist.TCPStore) else None


def _own_address(host: str, port: int) -> str:
    """That from which this machine reaches another. A datagram socket is connected without a packet.

    Raises:
        OSError: it reaches none of the other's addresses.
    """
    errors: list[OSError] = []
    for family, kind, *_, address in socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM):
        try:
            with socket.socket(family, kind) as probe:
                probe.connect(address)
                return str(probe.getsockname()[0])
        except OSError as error:  # of IPv6, on a machine without it
            errors.append(error)
    raise OSError(f"this machine does not reach {host}, where the ranks meet ({errors[-1]}): check MASTER_ADDR")
