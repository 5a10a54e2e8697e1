"""The benchmark of blocks between GPUs, in tiny form: both processes, with shared memory of the host for a GPU's."""

import json
from concurrent.futures import Future

import pytest
import torch
from support.imported_processes import imported_processes
from support.ipc_memory import device_slots, stand_in

from bench import kv_link, tables
from bench.kv_link import Job
from tritonllm.engine.transfer.peer import Peer

pytestmark = pytest.mark.long

SIZES = ["--layout", "tiny", "--layers", "2", "--link-bytes", "4096", "--repeats", "2", "--gpus", "cpu,cpu"]


@pytest.mark.smoke
def test_writes_results(tmp_path):
    out = tmp_path / "kv-link.json"
    with imported_processes():
        assert kv_link.main([*SIZES, "--tokens", "16,64", "--out", str(out)], stand_in) == 0
    report = json.loads(out.read_text())
    assert [(row["blocks"], row["shuffled"]) for row in report["loads"]] == [(1, False), (4, False), (4, True)]
    assert report["link"]["bytes"] == 4096 and report["link"]["gb_per_s"] > 0
    for row in report["loads"]:
        assert row["block_bytes"] == 2 * 2 * 16 * 1 * 8 * 2
        assert row["percent_of_link"] == pytest.approx(100 * row["gb_per_s"] / report["link"]["gb_per_s"])
    assert {"machine", "commit", "date"} <= set(report)
    text = tables.table(report, ())
    assert "64 tokens, shuffled" in text and text.count("\n|") == 2 + 3


def test_blocks_that_do_not_come_have_no_result(monkeypatch):
    make, job = stand_in(), Job((2,), 64, 64, 1)
    slots, described = kv_link.make_slots(job, torch.device("cpu"))
    assert described[:3] == device_slots([slots.view(torch.uint8).numpy()])[0][:3]
    owner, reader = (kv_link.make_peer(job, role, make, described) for role in ("kv_producer", "kv_consumer"))
    with pytest.raises(RuntimeError, match="2 of 2 blocks did not come"):
        kv_link.load(reader, slots, owner.offer(), job, 2, False)
    monkeypatch.setattr(Peer, "load", lambda self, keys, slots, params: made([True] * len(keys)))
    with pytest.raises(RuntimeError, match="or others came"):
        kv_link.load(reader, slots, owner.offer(), job, 2, False)
    owner.close()
    reader.close()


def made(result):
    future = Future()
    future.set_result(result)
    return future


def test_a_process_that_fails_is_named(tmp_path, capsys):
    out = tmp_path / "kv-link.json"
    with imported_processes():
        assert kv_link.main([*SIZES, "--tokens", "16", "--out", str(out)], no_device) == 1
    assert "no result: OSError: no way to that GPU" in capsys.readouterr().err and not out.exists()


def no_device():
    raise OSError("no way to that GPU")


def test_bad_arguments(capsys):
    for wrong, message in ((["--gpus", "0"], "--gpus must name two"), (["--tokens", "16,8"], "at least 16 each")):
        with pytest.raises(SystemExit):
            kv_link.parse(wrong)
        assert message in capsys.readouterr().err
    assert kv_link.main(["--gpus", "0,99"]) == 1 and "needs the GPUs" in capsys.readouterr().err
