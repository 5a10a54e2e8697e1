"""How ranks that may be on several machines find each other; tests/e2e/test_launcher_hosts.py has two hosts."""

import threading

import pytest
import torch
import torch.distributed as dist
from support.waiting import PATIENCE

from tritonllm.dist.connect import address_of, connect, own_address

CPU = torch.device("cpu")


@pytest.fixture
def store():
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def sums(store):
    """What two ranks get that are threads here."""
    found = {}

    def run(rank):
        reached = dist.TCPStore("127.0.0.1", store.port, is_master=False)
        group = connect(
            dist.PrefixStore("ranks", reached), rank, 2, CPU, timeout=PATIENCE, own=own_address("127.0.0.1", store.port)
        )
        found[rank] = float(group.all_reduce(torch.tensor([1.0 + rank])))

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    return found


@pytest.mark.parametrize("interface", [None, "lo", "lo,eth0"])
def test_ranks_meet_by_what_leads_to_the_first_or_by_a_device(store, monkeypatch, interface):
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    if interface is not None:
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", interface)
    assert sums(store) == {0: 3.0, 1: 3.0}


def test_a_device_that_is_not_there(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "none0")
    with pytest.raises(OSError, match="GLOO_SOCKET_IFNAME=none0 is no network device with an address"):
        own_address("127.0.0.1", 1)


def test_where_a_store_is(store):
    wrapped = dist.PrefixStore("b", dist.PrefixStore("a", store))
    assert address_of(wrapped) == ("127.0.0.1", store.port) and address_of(dist.HashStore()) is None
