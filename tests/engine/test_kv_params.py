"""What requests say of other engines: what is wrong with it, and what it is of no use for."""

import pytest

from tritonllm.engine.kv_params import TransferParams
from tritonllm.kv_transfer_config import KVTransferConfig

PLACE = {"do_remote_prefill": True, "do_remote_decode": False, "remote_host": "10.0.0.5", "remote_port": 9000}


def config(connector, role="kv_both"):
    return KVTransferConfig(kv_connector=connector, kv_role=role)


@pytest.mark.parametrize(
    ("of", "fix"),
    [
        (None, "this engine has no kv_transfer_config, and computes prompts itself: give it one with kv_con"),
        (config("Peer", "kv_producer"), "this engine has kv_role='kv_producer', which loads nothing"),
        (config("a.b:C", "kv_producer"), "give it kv_role kv_consumer or kv_both, and that host in peers"),
        (config("FileStore"), "kv_connector='FileStore' does not ask other engines"),
    ],
)
def test_who_cannot_load_from_the_named_engine_says_so_once(caplog, of, fix):
    params = TransferParams(of, tells=True)
    for one in (None, {}, {"do_remote_decode": True}, {**PLACE, "do_remote_prefill": False}):
        params.check(one)
    assert not caplog.records
    for _ in range(3):
        params.check(PLACE)
    (record,) = caplog.records
    assert record.levelname == "WARNING" and fix in record.getMessage()
    assert "kv_transfer_params name the engine at 10.0.0.5:9000, but" in record.getMessage()
    TransferParams(of).check(PLACE)  # in another process, which only checks
    assert len(caplog.records) == 1


@pytest.mark.parametrize("of", [config("Peer"), config("CudaIpc", "kv_consumer"), config("a.b:C")])
def test_who_can_says_nothing(caplog, of):
    TransferParams(of, tells=True).check(PLACE)
    assert not caplog.records
