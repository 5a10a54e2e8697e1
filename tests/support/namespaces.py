"""Hosts of a small network that exists only while a test holds it: network namespaces of Linux, joined by a bridge.

Each host is a namespace with one Ethernet device, a cable (a pair of veth devices) and an address; the bridge is in
one more namespace. None of them has a name: the kernel keeps a namespace while somebody has it open or runs in it. So
nothing is left behind, even by a test run that was killed, and two runs on one machine cannot meet.

A thread enters a host by :meth:`Host.inside`. Sockets that it makes then, processes that it starts and threads that it
starts are the host's; files, signals and memory are as they were. So a server is started on a host by what starts it
elsewhere, and two engines of one process can be on two hosts.
"""

import ctypes
import os
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TypeVar

import pytest

T = TypeVar("T")
CLONE_NEWNET = 0x40000000  # of sched.h; os.setns came with Python 3.12
_LIBC = ctypes.CDLL(None, use_errno=True)


class Host:
    """Args:
    number: from 1; the address ends with it.
    namespace: open file of its network namespace.
    """

    def __init__(self, number: int, namespace: int) -> None:
        self.address = f"10.231.0.{number}"
        self.hardware = f"02:00:00:00:00:{number:02x}"
        self.port = f"port{number}"  # of the bridge
        self.namespace = namespace

    @contextmanager
    def inside(self) -> Iterator[None]:
        """The calling thread is on this host meanwhile."""
        with _inside(self.namespace):
            yield


class Network:
    """Hosts on one bridge. :func:`network` makes it.

    Attributes:
        hosts: all of them can reach each other at first.
    """

    def __init__(self, hosts: list[Host], bridge: int) -> None:
        self.hosts, self._bridge = hosts, bridge

    def cut(self, host: Host) -> None:
        """What it sends, and what is sent to it, vanishes. Nobody is told, as when a switch behind others fails."""
        self._set_port(host, "nomaster")

    def mend(self, host: Host) -> None:
        """As it was before :meth:`cut`."""
        self._set_port(host, "master", "bridge0")

    def slow_down(self, host: Host, kilobits: int) -> None:
        """What is sent to it passes at so many kilobits a second, by a token bucket; up to a second of it waits."""
        with _inside(self._bridge):
            limit = ("rate", f"{kilobits}kbit", "burst", "4kb", "latency", "1s")
            _call("tc", "qdisc", "replace", "dev", host.port, "root", "tbf", *limit)

    def speed_up(self, host: Host) -> None:
        """As it was before :meth:`slow_down`."""
        with _inside(self._bridge):
            _call("tc", "qdisc", "del", "dev", host.port, "root")

    def _set_port(self, host: Host, *settings: str) -> None:
        with _inside(self._bridge):
            _call("ip", "link", "set", "dev", host.port, *settings)


@contextmanager
def network(count: int) -> Iterator[Network]:
    """So many hosts; skips the test where they cannot be made. Processes that are still on them stay there."""
    reason = _why_not()
    if reason is not None:
        pytest.skip(reason)
    with ExitStack() as stack:

        def namespace() -> int:
            made = _in_thread(_new_namespace)
            stack.callback(os.close, made)
            return made

        hosts, bridge = [Host(number, namespace()) for number in range(1, count + 1)], namespace()
        with _inside(bridge):
            _call("ip", "link", "add", "bridge0", "type", "bridge")
            _call("ip", "link", "set", "bridge0", "up")
            for host in hosts:
                peer = ("peer", "name", "eth0", "address", host.hardware, "netns", _path(host.namespace))
                _call("ip", "link", "add", host.port, "type", "veth", *peer)
                _call("ip", "link", "set", host.port, "master", "bridge0", "up")
        for host in hosts:
            _configure(host, hosts)
        yield Network(hosts, bridge)


def _configure(host: Host, hosts: list[Host]) -> None:
    with host.inside():
        _call("ip", "link", "set", "lo", "up")
        _call("ip", "address", "add", f"{host.address}/24", "dev", "eth0")
        _call("ip", "link", "set", "eth0", "up")
        for other in hosts:
            if other is not host:  # else a host that is cut off is noticed, since nobody answers who has its address
                hardware = ("lladdr", other.hardware, "dev", "eth0", "nud", "permanent")
                _call("ip", "neighbour", "add", other.address, *hardware)


def _why_not() -> str | None:
    """Why there can be no such hosts on this machine; ``None`` if there can."""
    for program in ("ip", "tc"):
        if shutil.which(program) is None:
            return f"hosts are network namespaces, which need the program {program} (iproute2)"
    try:
        problem = _in_thread(_try)
    except OSError as error:
        return f"hosts are network namespaces, which this process may not make ({error.strerror}): run as root"
    return problem and f"hosts need a bridge, veth and tbf of the kernel: {problem}"


def _try() -> str | None:
    """What this machine refuses of what hosts are made of. The namespace ends with the thread."""
    os.close(_new_namespace())
    for command in (
        "ip link add bridge0 type bridge",
        "ip link add port0 type veth peer name eth0",
        "tc qdisc add dev port0 root tbf rate 8kbit burst 4kb latency 1s",
    ):
        done = subprocess.run(command.split(), capture_output=True, text=True, check=False)
        if done.returncode:
            return f"{command}: {done.stderr.strip()}"
    return None


def _new_namespace() -> int:
    """The calling thread goes into a new one, for good."""
    if _LIBC.unshare(CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return _open_own()


def _open_own() -> int:
    return os.open("/proc/thread-self/ns/net", os.O_RDONLY)


def _path(namespace: int) -> str:
    """For another process, while this one has it open."""
    return f"/proc/{os.getpid()}/fd/{namespace}"


@contextmanager
def _inside(namespace: int) -> Iterator[None]:
    before = _open_own()
    try:
        _enter(namespace)
        yield
    finally:
        _enter(before)
        os.close(before)


def _enter(namespace: int) -> None:
    if _LIBC.setns(namespace, CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def _in_thread(function: Callable[[], T]) -> T:
    results: list[T | OSError] = []

    def run() -> None:
        try:
            results.append(function())
        except OSError as error:
            results.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    (result,) = results
    if isinstance(result, OSError):
        raise result
    return result


def _call(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(command)}: {done.stderr}"
