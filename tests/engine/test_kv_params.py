"""What requests say of other engines: what is wrong with it, and what it is of no use for."""

import pytest

from tritonllm.config.kv_transfer import KVTransferConfig
from tritonllm.engine.transfer.params import TransferParams

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


@pytest.mark.parametrize("of", [None, config("FileStore"), config("Peer"), config("Nixl", "kv_producer")])
@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"do_remote_prefil": True}, "'do_remote_prefil' is unknown; there are do_remote_prefill, do_remote_decode, "),
        ({"remote_hst": "a"}, "'remote_hst' is unknown; .* and of vLLM's, which are ignored, remote_engine_id"),
        ({3: 4}, "3 is unknown"),
        ({"do_remote_prefill": "true"}, "do_remote_prefill must be true or false, got 'true'"),
        ({"do_remote_decode": 1}, "do_remote_decode must be true or false, got 1"),
        ({"pending": 0}, "pending must be true or false, got 0"),
        ({"remote_host": 3}, "remote_host must be a host's name or address, got 3"),
        ({"remote_host": " "}, "remote_host must be a host's name or address, got ' '"),
        ({"remote_port": "9000"}, "remote_port must be an integer from 1 to 65535, got '9000'"),
        ({"remote_port": True}, "remote_port must be an integer from 1 to 65535, got True"),
        ({"remote_port": 0}, "remote_port must be an integer from 1 to 65535, got 0"),
        ({"remote_port": None}, "do_remote_prefill=true needs remote_host and remote_port, .*Missing: remote_port;"),
        ({"remote_host": None, "remote_port": None}, "Missing: remote_host, remote_port;"),
    ],
)
def test_what_is_refused(of, more, message):
    with pytest.raises(ValueError, match=f"kv_transfer_params: .*{message}"):
        TransferParams(of).check({**PLACE, **more})


@pytest.mark.parametrize("params", [3, "x", [PLACE]])
def test_what_is_no_dictionary(params):
    with pytest.raises(ValueError, match="kv_transfer_params must be a dict"):
        TransferParams(config("a.b:C")).check(params)


@pytest.mark.parametrize(
    "params",
    [
        {"do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None, "remote_block_ids": None},
        {"do_remote_decode": None, "do_remote_prefill": None, "remote_host": None, "remote_port": None},
        {**PLACE, "remote_block_ids": [[1, 2]], "remote_engine_id": "e", "remote_request_id": "r", "tp_size": 2},
        {**PLACE, "do_remote_prefill": False, "pending": True, "transfer_id": "t"},
        {"remote_host": "::1"},
    ],
)
def test_what_vllms_clients_say_is_taken(params):
    TransferParams(config("Peer")).check(params)


def test_a_connector_of_your_own_reads_what_it_likes():
    TransferParams(config("a.b:C")).check({"do_remote_prefill": True, "where": [3]})
