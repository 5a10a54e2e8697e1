"""Connectors by name."""

import pytest
from support.engines import tiny_checkpoint

from tritonllm.config.engine import EngineConfig
from tritonllm.config.kv_transfer import KVTransferConfig
from tritonllm.engine.loop.engine import LLMEngine
from tritonllm.engine.start import startup
from tritonllm.engine.transfer.file_store import FileStore
from tritonllm.engine.transfer.settings import check_connector, make_connector

KEY = 3


class Mine:
    def __init__(self, **settings):
        self.settings = settings


class Strict:
    def __init__(self, folder, depth=1):
        pass

    @staticmethod
    def check_settings(folder, depth=1):
        if depth < 1:
            raise ValueError(f"depth must be at least 1, got {depth}")


def engine_config(name, extra, **more):
    transfer = {"kv_connector": name, "kv_connector_extra_config": extra}
    return EngineConfig.from_kwargs(
        **{"model": "no/model", "kv_offloading_size": 0.01, "kv_transfer_config": transfer} | more
    )


def test_a_file_store(tmp_path):
    extra = {"path": str(tmp_path), "max_bytes": 1000, "timeout": 3}
    store = make_connector(KVTransferConfig(kv_connector="FileStore", kv_connector_extra_config=extra))
    assert isinstance(store, FileStore)
    assert (store.files.folder, store.files.max_bytes) == (tmp_path, 1000)


def test_one_of_your_own():
    config = KVTransferConfig(kv_connector=f"{__name__}:Mine", kv_connector_extra_config={"a": 1, "timeout": 2})
    assert make_connector(config).settings == {"a": 1}


@pytest.mark.parametrize(
    ("name", "extra", "message"),
    [
        (
            "FileStore",
            {"folder": "x"},
            "'folder' is none of FileStore's; there are path, max_bytes, max_age, threads, access, t",
        ),
        ("no.such:Thing", {}, "kv_connector='no.such:Thing' cannot be imported"),
        (f"{__name__}:Nothing", {}, "cannot be imported"),
    ],
)
def test_bad_names(name, extra, message):
    with pytest.raises(ValueError, match=message):
        make_connector(KVTransferConfig(kv_connector=name, kv_connector_extra_config=extra))


@pytest.mark.parametrize(
    ("name", "extra", "message"),
    [
        ("FileStore", {}, "path must be the folder"),
        ("FileStore", {"path": "x", "max_bytes": None}, "max_bytes must be an integer of at least 1, got None"),
        ("FileStore", {"path": "/proc/x"}, "path='/proc/x' cannot be written to"),
        ("Peer", {}, "peers is missing"),
        ("Peer", {"peers": ["*"], "port": -1}, "port must be an integer from 0 to 65535, got -1"),
        ("Peer", {"peers": ["*"], "host": "::"}, "host='::' tells nobody where to connect"),
        ("Nixl", {"peers": ["*"], "wait": "1"}, "wait must be a number of seconds of at least 0, got '1'"),
        ("CudaIpc", {"peers": ["*"], "threads": 0}, "threads must be an integer of at least 1, got 0"),
        ("no.such:Thing", {}, "kv_connector='no.such:Thing' cannot be imported"),
        (f"{__name__}:KEY", {}, "must be a class or a function, got 3"),
        (f"{__name__}:Strict", {}, "does not take it .missing a required argument: 'folder'., got {}"),
        (
            f"{__name__}:Strict",
            {"folder": "x", "deep": 1},
            "does not take it .got an unexpected keyword argument 'deep'",
        ),
        (f"{__name__}:Strict", {"folder": "x", "depth": 0}, "depth must be at least 1, got 0"),
    ],
)
def test_wrong_settings_are_refused_without_an_engine(name, extra, message):
    with pytest.raises(ValueError, match=message):
        check_connector(engine_config(name, extra))


def test_a_connector_between_gpus_is_refused_on_the_cpu():
    with pytest.raises(ValueError, match="kv_connector='CudaIpc' needs a CUDA device, and device='cpu' is none"):
        check_connector(engine_config("CudaIpc", {"peers": ["*"]}, device="cpu"))


def test_right_settings_are_taken_and_nothing_begins(tmp_path):
    check_connector(EngineConfig.from_kwargs(model="m"))
    check_connector(engine_config("FileStore", {"path": str(tmp_path / "new"), "timeout": 3}))
    assert list((tmp_path / "new").iterdir()) == []
    check_connector(engine_config("Peer", {"peers": ["*"], "port": 1}))  # which this process may not take
    check_connector(engine_config(f"{__name__}:Strict", {"folder": "x", "timeout": 3}))


@pytest.mark.parametrize(
    ("extra", "size", "message"),
    [
        ({"max_bytes": 1000}, 0.01, "max_bytes=1000 holds not even two blocks of"),
        ({}, 1e-9, "kv_offloading_size=1e-09 holds no block"),
    ],
)
def test_blocks_that_do_not_fit_are_refused_before_weights_are_read(tmp_path, monkeypatch, extra, size, message):
    monkeypatch.setattr(startup, "load_model", lambda *args, **kwargs: pytest.fail("the model was loaded"))
    more = {"model": str(tiny_checkpoint()), "skip_tokenizer_init": True, "kv_offloading_size": size}
    config = engine_config("FileStore", {"path": str(tmp_path), **extra}, **more)
    with pytest.raises(ValueError, match=message):
        LLMEngine.from_config(config)
