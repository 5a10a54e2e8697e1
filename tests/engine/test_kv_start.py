"""Connectors by name."""

import pytest

from tritonllm.engine.kv_file_store import FileStore
from tritonllm.engine.kv_start import make_connector
from tritonllm.kv_transfer_config import KVTransferConfig


class Mine:
    def __init__(self, **settings):
        self.settings = settings


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
            "'folder' is none of FileStore's; there are path, max_bytes, max_age, threads, t",
        ),
        ("no.such:Thing", {}, "kv_connector='no.such:Thing' cannot be imported"),
        (f"{__name__}:Nothing", {}, "cannot be imported"),
    ],
)
def test_bad_names(name, extra, message):
    with pytest.raises(ValueError, match=message):
        make_connector(KVTransferConfig(kv_connector=name, kv_connector_extra_config=extra))
