"""What a user can say of where blocks go and come from."""

import json

import pytest

from tritonllm.config.engine import EngineConfig
from tritonllm.config.kv_transfer import KVTransferConfig
from tritonllm.engine.start.arg_utils import EngineArgs

FILES = {"kv_connector": "FileStore", "kv_role": "kv_consumer", "kv_connector_extra_config": {"path": "x"}}


def test_vllms_dictionary_its_json_and_the_value_itself_are_the_same():
    config = KVTransferConfig.of(FILES)
    assert config == KVTransferConfig.of(json.dumps(FILES)) == KVTransferConfig.of(config)
    assert config.kv_connector_extra_config == {"path": "x"}
    engine = {"model": "m", "kv_offloading_size": 1.0}
    assert EngineConfig.from_kwargs(**engine, kv_transfer_config=FILES).kv_transfer_config == config
    assert (
        EngineArgs(**engine, kv_transfer_config=json.dumps(FILES)).create_engine_config().kv_transfer_config == config
    )
    assert EngineConfig.from_kwargs(model="m", kv_transfer_config=None).kv_transfer_config is None


@pytest.mark.parametrize(
    ("role", "saves", "loads"),
    [("kv_both", True, True), ("kv_producer", True, False), ("kv_consumer", False, True)],
)
def test_roles(role, saves, loads):
    config = KVTransferConfig(kv_connector="my.module:Connector", kv_role=role)
    assert (config.saves, config.loads) == (saves, loads)


def test_the_time_that_a_request_waits():
    assert KVTransferConfig(kv_connector="FileStore").timeout > 0
    assert KVTransferConfig(kv_connector="FileStore", kv_connector_extra_config={"timeout": 0.5}).timeout == 0.5


@pytest.mark.parametrize(
    ("connector", "role", "extra", "on_device", "kept"),
    [
        ("Peer", "kv_both", {"max_bytes": 5}, False, 0),
        ("CudaIpc", "kv_both", {}, True, 4 << 30),
        ("CudaIpc", "kv_producer", {"max_bytes": 5}, True, 5),
        ("CudaIpc", "kv_consumer", {"max_bytes": 5}, True, 0),
    ],
)
def test_what_it_takes_of_the_gpus_memory(connector, role, extra, on_device, kept):
    config = KVTransferConfig(kv_connector=connector, kv_role=role, kv_connector_extra_config=extra)
    assert (config.on_device, config.kept_device_bytes) == (on_device, kept)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("{", "kv_transfer_config is no JSON"),
        (3, "kv_transfer_config must be a dict, its JSON, or None, got 3"),
        ({}, "kv_connector is missing"),
        ({**FILES, "kv_rank": 0}, "'kv_rank' is not supported; there are kv_connector, kv_role"),
        ({"kv_connector": "NixlConnector"}, "kv_connector must be one of FileStore.* or 'module:name', got 'Nixl"),
        ({"kv_connector": 3}, "kv_connector must be one of"),
        ({**FILES, "kv_role": "producer"}, "kv_role must be one of kv_both, kv_producer, kv_consumer, got 'producer'"),
        ({**FILES, "kv_connector_extra_config": "x"}, "kv_connector_extra_config must be a dict of settings"),
        ({**FILES, "kv_connector_extra_config": {3: 4}}, "kv_connector_extra_config must be a dict of settings"),
        ({**FILES, "kv_connector_extra_config": {"timeout": 0}}, "timeout must be a number of seconds above 0, got 0"),
        ({**FILES, "kv_connector_extra_config": {"timeout": True}}, "timeout must be a number of seconds above 0"),
    ],
)
def test_bad_values(value, message):
    with pytest.raises(ValueError, match=message):
        KVTransferConfig.of(value)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({}, "kv_transfer_config needs kv_offloading_size"),
        ({"kv_offloading_size": 1, "enable_prefix_caching": False}, "kv_transfer_config needs enable_prefix_caching"),
        ({"kv_offloading_size": 1, "tensor_parallel_size": 2}, "kv_offloading_size: ranks do not offload"),
    ],
)
def test_what_it_needs_of_the_engine(more, message):
    with pytest.raises(ValueError, match=message):
        EngineConfig.from_kwargs(model="m", kv_transfer_config=FILES, **more)


@pytest.mark.parametrize("connector", ["Peer", "Nixl", "CudaIpc"])
def test_several_engines_do_not_listen_at_one_port(connector):
    def made(count, role="kv_both", **extra):
        transfer = {"kv_connector": connector, "kv_role": role, "kv_connector_extra_config": extra}
        more = {"data_parallel_size": count, "kv_offloading_size": 1, "kv_transfer_config": transfer}
        return EngineConfig.from_kwargs(model="m", **more)

    for role in ("kv_both", "kv_producer"):
        with pytest.raises(ValueError, match="port=9007 with data_parallel_size=2: each engine needs its own; leave p"):
            made(2, role, port=9007)
    for config in (made(2, port=0), made(2), made(1, port=9007), made(2, "kv_consumer", port=9007)):
        assert config.kv_transfer_config is not None
