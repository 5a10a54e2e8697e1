"""How a rank meets the others: which group connects it to them."""

import fcntl
import socket
import struct
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tritonllm import env
from tritonllm.dist.group import ALONE, ConnectedGroup, Group

SIOCGIFADDR = 0x8915  # of sockios.h: ask for a device's address
IPV6_DEVICES, LINK = "/proc/net/if_inet6", "20"  # lines of addresses with their scopes, and that of one link
MOST_PEERS = 8  # ranks whose GPUs write to each other's memory


def connect(
    store: Any,
    rank: int,
    size: int,
    device: torch.device,
    *,
    timeout: float,
    own: str | None = None,
    peers: bool = True,
) -> Group:
    """Meet the other ranks.

    Args:
        store: a store of torch.distributed that all ranks reach.
        device: CPU for gloo, a CUDA device for NCCL.
        timeout: seconds that a collective may take.
        own: the address of this machine at which gloo listens to the others, of :func:`own_address`; by default that
            which only this machine reaches, on which all ranks are then.
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
    # gloo's own default is the address of this machine's name, that of the loopback device on many: nobody else can
    # connect to it
    options._devices = [gloo.create_device(hostname=own or "127.0.0.1")]
    return ConnectedGroup(gloo(store, rank, size, options), device)


def local_store() -> tuple[dist.TCPStore, int]:
    """A store at which processes of this machine meet, and its port: a free one, open to this machine only."""
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    how: dict[str, Any] = {"is_master": True, "wait_for_workers": False}
    return dist.TCPStore("127.0.0.1", port, **how, master_listen_fd=listener.detach()), port


def address_of(store: Any) -> tuple[str, int] | None:
    """The host and the port of a store; ``None`` if it is not on a network."""
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return (store.host, store.port) if isinstance(store, dist.TCPStore) else None


def own_address(host: str, port: int) -> str:
    """The address at which others who reach that host reach this machine: that of the network device that
    ``GLOO_SOCKET_IFNAME`` names, or else the one from which this machine reaches the host.

    Raises:
        OSError: there is no such device, or it has no address; or this machine reaches none of the host's addresses.
    """
    interface = env.gloo_interface()
    return _reaches(host, port) if interface is None else _address_of_device(interface)


def _address_of_device(name: str) -> str:
    """The first IPv4 address of a network device, or else its first IPv6 address that is of more than its own link."""
    request = struct.pack("256s", name.encode()[:15])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        try:
            found = fcntl.ioctl(asking.fileno(), SIOCGIFADDR, request)
            return socket.inet_ntoa(found[20:24])
        except OSError as error:
            for line in _lines(IPV6_DEVICES):
                address, _, _, scope, _, device = line.split()
                if device == name and scope != LINK:
                    return socket.inet_ntop(socket.AF_INET6, bytes.fromhex(address))
            raise OSError(
                f"GLOO_SOCKET_IFNAME={name} is no network device with an address ({error.strerror})"
            ) from error


def _lines(path: str) -> list[str]:
    """The lines of a file of the kernel's; empty where there is no such file."""
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []


def _reaches(host: str, port: int) -> str:
    """The address from which this machine reaches another. A datagram socket is connected without a packet.

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
