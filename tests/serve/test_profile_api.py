"""Traces of a running server, over HTTP and through AsyncLLM."""

import asyncio
import json
import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from support.engines import greedy, tiny_checkpoint
from support.imported_processes import imported_processes
from support.server import MODEL, eventually, running_server
from support.streams import Stream
from support.trace_rules import check_trace, load
from support.waiting import PATIENCE

from tritonllm import AsyncEngineArgs, AsyncLLM
from tritonllm.cli import main
from tritonllm.serve.engines.engine_calls import ProfileRefusedError
from tritonllm.serve.engines.profiling import ProfilerConfig
from tritonllm.telemetry.trace_reader import read_trace
from tritonllm.telemetry.trace_summary import summarize

BODY = {"model": MODEL, "prompt": "There was a fox named", "max_tokens": 12, "temperature": 0, "ignore_eos": True}
ENGINE = {"block_size": 4, "num_gpu_blocks_override": 64, "max_num_seqs": 8, "max_num_batched_tokens": 64}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("profiles") / "made" / "by the server"


@pytest.fixture(scope="module")
def profiled(folder):
    config = json.dumps({"profiler": "torch", "torch_profiler_dir": str(folder), "ignore_frontend": True})
    with running_server("--profiler-config", config, "--api-server-count", "2") as running:
        yield running


def post(server, path, **kwargs):
    with httpx.Client(base_url=server.url, timeout=PATIENCE) as client:  # either process answers
        return client.post(path, **kwargs)


def leave(server):
    """Begin to read a stream, and go: the request is aborted."""
    with httpx.stream(
        "POST", f"{server.url}/v1/completions", json={**BODY, "max_tokens": 2000, "stream": True}
    ) as reply:
        next(reply.iter_lines())


def test_a_trace_between_start_and_stop(profiled, folder, capsys):
    eventually(profiled.is_idle)
    reply = post(profiled, "/stop_profile")
    assert reply.status_code == 409 and "no trace is written" in reply.json()["error"]["message"]
    began = Stream(profiled, max_tokens=150)  # runs when the trace begins
    reply = post(profiled, "/start_profile?profile_prefix=mine")
    file = Path(reply.json()["file"])
    assert reply.status_code == 200 and file.parent == folder and file.name.startswith("mine-")
    again = post(profiled, "/start_profile")
    assert again.status_code == 409 and str(file) in again.json()["error"]["message"]
    with ThreadPoolExecutor(6) as pool:
        replies = list(pool.map(lambda n: post(profiled, "/v1/completions", json={**BODY, "n": 1 + n % 2}), range(6)))
    assert [reply.status_code for reply in replies] == [200] * 6
    leave(profiled)
    began.end()
    eventually(profiled.is_idle)
    still = Stream(profiled, max_tokens=300)
    reply = post(profiled, "/stop_profile")
    assert reply.status_code == 200 and reply.json()["file"] == str(file)
    assert "stop_profile" in reply.json()["note"]
    still.end()
    events = load(file)
    assert len(events) == reply.json()["events"]
    check_trace(events)
    data = read_trace(file)
    summary = summarize(data)
    ended = [one for one in summary["requests"] if not one["unfinished"]]
    assert sum(one["output_tokens"] == 12 * one["sequences"] and one["ttft_ms"] is not None for one in ended) == 6
    assert ["abort"] in [one["finish_reasons"] for one in ended]
    assert [one["arrival_ms"] for one in ended].count(None) <= 1 == summary["totals"]["unfinished"]
    assert data.complete and main(["trace", str(file)]) == 0
    assert "requests" in capsys.readouterr().out
    assert post(profiled, "/stop_profile").status_code == 409


def test_two_clients_at_once_get_one_trace(profiled):
    with ThreadPoolExecutor(8) as pool:
        replies = list(pool.map(lambda _: post(profiled, "/start_profile"), range(8)))
        assert sorted(reply.status_code for reply in replies) == [200] + 7 * [409]
        replies = list(pool.map(lambda _: post(profiled, "/stop_profile"), range(8)))
        assert sorted(reply.status_code for reply in replies) == [200] + 7 * [409]


@pytest.mark.parametrize("prefix", ["../up", "a/b", "", "x" * 65, "tab\t"])
def test_bad_prefixes(profiled, folder, prefix):
    reply = post(profiled, "/start_profile", params={"profile_prefix": prefix})
    assert reply.status_code == 400 and "profile_prefix must be" in reply.json()["error"]["message"]


def test_pages_of_browsers_are_refused(profiled):
    for path in ("/start_profile", "/stop_profile"):
        assert post(profiled, path, headers={"Origin": "http://elsewhere.example"}).status_code == 403


def test_without_a_folder(server):
    for path in ("/start_profile", "/stop_profile"):
        reply = post(server, path)
        assert reply.status_code == 404 and "--profiler-config" in reply.json()["error"]["message"]


def make_llm(folder, **more):
    args = AsyncEngineArgs(model=str(tiny_checkpoint()), **ENGINE)
    with imported_processes():
        return AsyncLLM(args.create_engine_config(), profiler_config={"torch_profiler_dir": str(folder), **more})


async def run(llm, name):
    return [output async for output in llm.generate(list(range(5, 25)), greedy(20), name)]


def test_limits_and_errors_through_async_llm(tmp_path):
    with asyncio.Runner() as runner:
        llm = make_llm(tmp_path / "a", max_iterations=5, delay_iterations=3)
        try:
            file = runner.run(_follow(llm, tmp_path / "a"))
        finally:
            llm.shutdown()
    check_trace(load(file))
    assert read_trace(file).why == "the engine ended"


def test_an_engine_that_is_killed_leaves_what_it_wrote(tmp_path):
    with asyncio.Runner() as runner:
        llm = make_llm(tmp_path, torch_profiler_use_gzip=False)
        try:
            file = Path(runner.run(llm.start_profile())["file"])
            runner.run(run(llm, "a"))
            eventually(lambda: len(read_trace(file).requests) == 1)
            os.kill(llm.engine_pid, signal.SIGKILL)
        finally:
            llm.shutdown()
    data = read_trace(file)
    assert file.suffix == ".json" and not data.complete and len(data.steps) == 20
    assert summarize(data)["requests"][0]["output_tokens"] == 20


async def _follow(llm, folder):
    file = Path((await llm.start_profile())["file"])
    with pytest.raises(ProfileRefusedError, match="is written already"):
        await llm.start_profile()
    await run(llm, "a")
    data = read_trace(file)  # it has ended itself
    assert data.complete and len(data.steps) == 5 and "max_iterations" in data.why
    assert data.steps[0].args["step"] >= 3
    second = Path((await llm.start_profile("again"))["file"])  # so the next one may begin
    await run(llm, "b")
    answer = await llm.stop_profile()
    assert answer["file"] == str(second) and "max_iterations" in answer["note"]
    with pytest.raises(ProfileRefusedError, match="no trace is written"):
        await llm.stop_profile()
    check_trace(load(file))
    check_trace(load(second))
    for path in folder.iterdir():
        path.unlink()
    folder.rmdir()
    with pytest.raises(RuntimeError, match="No such file"):
        await llm.start_profile()
    assert len(await run(llm, "c")) > 1  # the engine goes on
    folder.mkdir()
    return (await llm.start_profile())["file"]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("{", "must be a JSON object"),
        ("[]", "must be a JSON object"),
        ("{}", "torch_profiler_dir must name a folder"),
        ({"torch_profiler_dir": 3}, "torch_profiler_dir must name a folder"),
        ({"torch_profiler_dir": "x", "profiler": "xprof"}, "profiler must be one of torch, cuda"),
        ({"torch_profiler_dir": "x", "profiler": "cuda"}, "'cuda' writes no files"),
        ({"torch_profiler_dir": "x", "max_iterations": -1}, "max_iterations must be an integer of at least 0"),
        ({"torch_profiler_dir": "x", "max_events": 10}, "max_events must be an integer of at least 1000"),
        ({"torch_profiler_dir": "x", "torch_profiler_use_gzip": 1}, "torch_profiler_use_gzip must be true or false"),
        ({"torch_profiler_dir": "x", "torch_profiler_with_stack": True}, "torch_profiler_with_stack=True"),
        ({"torch_profiler_dir": "x", "folder": "y"}, "unknown key 'folder'"),
    ],
)
def test_bad_configurations(config, message):
    with pytest.raises(ValueError, match=message.replace("[", r"\[")):
        ProfilerConfig.of(config)


def test_folders(tmp_path, capsys):
    config = ProfilerConfig.of({"torch_profiler_dir": "~/traces", "torch_profiler_with_stack": False})
    assert Path(config.torch_profiler_dir) == Path.home() / "traces"
    (tmp_path / "file").write_text("")
    with pytest.raises(SystemExit):
        main(["serve", "--profiler-config", json.dumps({"torch_profiler_dir": str(tmp_path / "file" / "in it")})])
    assert "cannot be made" in capsys.readouterr().err
