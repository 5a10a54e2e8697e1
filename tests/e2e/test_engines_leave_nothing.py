"""Engines that start and end in one process leave nothing of it behind: files, shared memory, threads, processes and
temporary folders are as many after ten as after the first, whatever the executor and the layout."""

import json
import multiprocessing.util
import os
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from support import forked_programs
from support.engines import greedy, tiny_checkpoint, tiny_llm, token_ids
from support.imported_processes import imported_processes
from support.leftovers import held
from support.ports import reserved_port
from support.ray_cluster import all_free, two_nodes
from support.waiting import PATIENCE, eventually

FEW_KEY_HEADS = {"num_attention_heads": 4, "num_key_value_heads": 1}
LAYOUTS = {  # the checkpoint's family and fields, and the engine's arguments
    "one rank": (("qwen3", {}), {}),
    "ranks": (("qwen3", {}), {"tensor_parallel_size": 2}),
    "stages": (("qwen3", {}), {"pipeline_parallel_size": 2, "async_scheduling": True}),
    "split keys": (("qwen3", FEW_KEY_HEADS), {"tensor_parallel_size": 2, "decode_context_parallel_size": 2}),
    "engines": (("qwen3", {}), {"data_parallel_size": 2}),
    "shared experts": (("qwen3_moe", {}), {"data_parallel_size": 2, "enable_expert_parallel": True}),
}
long = pytest.mark.long
RANKS = ["ranks", pytest.param("stages", marks=long), pytest.param("split keys", marks=long)]  # by others, too
FOLLOWING = """
import json, sys
from tritonllm import LLM
LLM(sys.argv[1], **json.loads(sys.argv[2]))
"""


@pytest.fixture
def temporary(monkeypatch):
    """Where this process and those that it starts make temporary folders meanwhile."""
    for family, fields in (checkpoint for checkpoint, _ in LAYOUTS.values()):
        tiny_checkpoint(family, **fields)  # which stays for other tests
    multiprocessing.util.get_temp_dir()  # which multiprocessing keeps
    with tempfile.TemporaryDirectory(prefix="left-") as folder:  # a short name: sockets lie in it
        monkeypatch.setattr(tempfile, "tempdir", folder)
        monkeypatch.setenv("TMPDIR", folder)
        yield Path(folder)


def run_one(layout: str, **options) -> None:
    """Start an engine, let it answer, and end it."""
    (family, fields), arguments = LAYOUTS[layout]
    llm = tiny_llm(tiny_checkpoint(family, **fields), **arguments, **options)
    assert token_ids(llm.generate([[1, 2, 3]], greedy(2), use_tqdm=False))
    llm.shutdown()


def assert_same_after(count: int, once: Callable[[], None], temporary: Path) -> None:
    """What is made for all engines is there after the first."""
    once()
    before, folders = held(), set(temporary.iterdir())
    for _ in range(count):
        once()
    try:
        eventually(lambda: not held() - before and set(temporary.iterdir()) <= folders)
    except AssertionError:
        assert (held() - before, set(temporary.iterdir()) - folders) == ({}, set())


ENGINES = [2, pytest.param(10, marks=long)]


@pytest.mark.parametrize("count", ENGINES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_of_one_process_and_spawned_ranks(layout, count, temporary):
    with imported_processes():
        assert_same_after(count, partial(run_one, layout), temporary)


@pytest.mark.parametrize("count", ENGINES)
@pytest.mark.parametrize("layout", RANKS)
def test_of_a_launcher(layout, count, temporary, monkeypatch):
    (family, fields), arguments = LAYOUTS[layout]
    options = {**arguments, "distributed_executor_backend": "external_launcher"}
    settings = {"block_size": 4, "num_blocks": 64, "max_num_seqs": 8, "max_num_batched_tokens": 64}  # of tiny_llm
    words = [str(tiny_checkpoint(family, **fields)), json.dumps({**settings, **options})]

    def once() -> None:
        with reserved_port() as port:
            place = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
            for name, value in {**place, "RANK": "0", "LOCAL_RANK": "0"}.items():
                monkeypatch.setenv(name, value)
            environment = {**os.environ, **place, "RANK": "1", "LOCAL_RANK": "1"}
            follows = forked_programs.Popen([sys.executable, "-c", FOLLOWING, *words], env=environment)
            try:
                run_one(layout, distributed_executor_backend="external_launcher")
                assert follows.wait(PATIENCE) == 0
            finally:
                follows.kill()
                follows.wait()

    assert_same_after(count, once, temporary)


@pytest.fixture(scope="module")
def cluster():
    pytest.importorskip("ray")
    with two_nodes() as made:
        yield made


@pytest.mark.long
@pytest.mark.parametrize("layout", RANKS)
def test_of_ray(layout, cluster, temporary):
    def once() -> None:
        run_one(layout, distributed_executor_backend="ray")
        eventually(all_free)

    assert_same_after(10, once, temporary)
