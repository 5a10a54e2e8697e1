"""``tritonllm bench serve``: when requests are sent, what is counted, and a run against a server."""

import argparse
import asyncio
import io
import json
import random
import statistics
import sys

import pytest
from support.fake_server import fake_server
from support.server import MODEL, eventually

from tritonllm.cli import bench_serve_plot, main
from tritonllm.cli.bench_serve import PlannedRequest, Told, arrivals, read_trace, results
from tritonllm.cli.bench_serve_client import lines

pytestmark = pytest.mark.long


def arguments(**more):
    given = {"num_prompts": 4000, "input_len": 100, "output_len": 10, "random_range_ratio": 0.0}
    return argparse.Namespace(**{**given, "request_rate": 20.0, "burstiness": 1.0, **more})


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_arrivals_have_the_rate_and_the_shape(burstiness):
    """A gamma distribution of shape s has a coefficient of variation of 1 / sqrt(s)."""
    asks = arrivals(arguments(burstiness=burstiness), random.Random(0))
    gaps = [b.at - a.at for a, b in zip(asks, asks[1:], strict=False)]  # noqa: RUF007
    mean = statistics.fmean(gaps)
    assert mean == pytest.approx(1 / 20, rel=0.1)
    assert statistics.pstdev(gaps) / mean == pytest.approx(burstiness**-0.5, rel=0.1)
    assert arrivals(arguments(burstiness=burstiness), random.Random(0)) == asks


def test_all_at_once_and_lengths_that_vary():
    asks = arrivals(arguments(request_rate=float("inf"), random_range_ratio=0.5), random.Random(0))
    assert {ask.at for ask in asks} == {0.0}
    lengths = [ask.input_len for ask in asks]
    assert (min(lengths), max(lengths)) == (50, 150)


def test_a_trace(tmp_path):
    path = tmp_path / "trace.jsonl"
    path.write_text(
        '{"timestamp": 1500, "input_length": 7, "output_length": 3, "hash_ids": [1]}\n\n'
        '{"timestamp": 0, "input_length": 5, "output_length": 2}\n'
    )
    assert read_trace(path) == [PlannedRequest(0.0, 5, 2), PlannedRequest(1.5, 7, 3)]
    path.write_text(
        '{"timestamp": 1700000001500, "input_length": 7, "output_length": 3}\n'
        '{"timestamp": 1700000000000, "input_length": 5, "output_length": 2}\n'
    )
    assert read_trace(path) == [PlannedRequest(0.0, 5, 2), PlannedRequest(1.5, 7, 3)], "from the first request on"
    path.write_bytes(
        b'\xef\xbb\xbf{"timestamp": 0, "input_length": 5, "output_length": 2, "who": "a\xe2\x80\xa8b"}\r\n'
    )
    assert read_trace(path) == [PlannedRequest(0.0, 5, 2)]
    for text, message in (
        ("{}", "line 1 needs"),
        ("", "has no requests"),
        ("[", "line 1 needs"),
        ("[" * 100_000, "line 1 needs"),
        ('\n{"timestamp": NaN, "input_length": 5, "output_length": 2}', "line 2: .* timestamp finite"),
        ('{"timestamp": 1e999, "input_length": 5, "output_length": 2}', "line 1: .* timestamp finite"),
        ('{"timestamp": -1, "input_length": 5, "output_length": 2}', "line 1: .* not negative"),
        ('{"timestamp": 0, "input_length": Infinity, "output_length": 2}', "line 1 needs"),
        ('{"timestamp": 0, "input_length": 5, "output_length": NaN}', "line 1 needs"),
    ):
        path.write_text(text)
        with pytest.raises(ValueError, match=message):
            read_trace(path)


def test_what_is_counted():
    fast = Told(PlannedRequest(0, 10, 3), sent=1.0, arrivals=[1.1, 1.2, 1.4], output_tokens=3)
    slow = Told(PlannedRequest(0, 20, 2), sent=1.0, arrivals=[2.0, 3.0], output_tokens=2)
    lost = Told(PlannedRequest(0, 5, 2), sent=1.0, arrivals=[1.5], error="broke off")
    report = results([fast, slow, lost], 2.0, {"ttft": 200.0, "tpot": 500.0})
    assert (report["num_requests"], report["failed_requests"]) == (2, 1)
    assert (report["prompt_tokens"], report["output_tokens"]) == (30, 5)
    assert report["requests_per_second"] == 1.0
    assert report["goodput"]["requests_per_second"] == 0.5, "the slow one keeps neither limit"
    assert report["time_to_first_token_ms"]["mean"] == pytest.approx(550)
    assert report["time_per_output_token_ms"]["mean"] == pytest.approx((150 + 1000) / 2)
    assert report["inter_token_latency_ms"]["mean"] == pytest.approx((100 + 200 + 1000) / 3)
    assert report["end_to_end_latency_ms"]["mean"] == pytest.approx((400 + 2000) / 2)


@pytest.mark.smoke
def test_a_run(server, tmp_path, capsys):
    path = tmp_path / "result.json"
    options = ["--num-prompts", "12", "--input-len", "20", "--output-len", "8", "--request-rate", "200"]
    options += ["--burstiness", "0.5", "--max-concurrency", "4", "--goodput", "ttft:1e9", "e2el:1e9"]
    assert main(["bench", "serve", "--base-url", server.url, *options, "--output-json", str(path)]) == 0
    report = json.loads(path.read_text())
    assert (report["benchmark"], report["model"], report["num_requests"]) == ("serve", MODEL, 12)
    assert (report["prompt_tokens"], report["output_tokens"]) == (240, 96)
    assert report["goodput"]["requests_per_second"] == report["requests_per_second"]
    assert report["arguments"]["burstiness"] == 0.5 and report["versions"]["tritonllm"]
    assert "inter-token latency, ms, 99%" in capsys.readouterr().out
    eventually(server.is_idle)


def test_a_server_that_refuses(server, capsys):
    assert main(["bench", "serve", "gpt-9", "--base-url", server.url, "--num-prompts", "1"]) == 1
    assert "'gpt-9' is not served" in capsys.readouterr().err
    assert main(["bench", "serve", "--base-url", "http://127.0.0.1:9", "--num-prompts", "1"]) == 1
    assert "--base-url" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--request-rate", "0"], "--request-rate must be greater"),
        (["--burstiness", "-1"], "--burstiness must be greater"),
        (["--num-prompts", "0"], "--num-prompts must be"),
        (["--max-concurrency", "0"], "--max-concurrency must be"),
        (["--goodput", "ttft"], "--goodput must be one of"),
        (["--goodput", "itl:5"], "--goodput must be one of"),
        (["--plot", "picture.txt"], "--plot must end with one of"),
        (["--base-url", "127.0.0.1:8000"], "--base-url must begin with http:// or https://, as http://127.0.0.1:8000"),
        (["--trace", "x", "--request-rate", "5"], "--request-rate does not go with --trace"),
        (["--trace", "x", "--burstiness", "1"], "--burstiness does not go with --trace"),
        (["--trace", "x", "--num-prompts", "100"], "--num-prompts does not go with --trace"),
        (["--trace", "x", "--input-len", "128"], "--input-len does not go with --trace"),
        (["--trace", "x", "--output-len", "64"], "--output-len does not go with --trace"),
        (["--trace", "x", "--random-range-ratio", "0"], "--random-range-ratio does not go with --trace"),
        (["--temperature", "nan"], "--temperature must be at least 0"),
        (["--burstiness", "inf"], "--burstiness must be greater than 0 and finite"),
        (["--goodput", "ttft:inf"], "--goodput must be one of"),
        (["--base-url", "http://127.0.0.1:80a0"], "--base-url must begin with"),
    ],
)
def test_a_mistake_is_wrong_usage(options, message, capsys):
    with pytest.raises(SystemExit) as caught:
        main(["bench", "serve", *options])
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


def test_what_a_plot_shows():
    assert bench_serve_plot.shares([3.0, 1.0, 1.0, 9.0]) == ([1.0, 1.0, 3.0, 9.0], [0.25, 0.5, 0.75, 1.0])
    middles, per_second = bench_serve_plot.rates([10.0, 10.05, 16.0], 10.0, 6.0)
    assert (middles[0], per_second[0], per_second[-1]) == pytest.approx((0.05, 20.0, 10.0))
    assert sum(per_second) == pytest.approx(30.0)


def test_a_plot(server, tmp_path):
    path = tmp_path / "plots" / "run.svg"
    options = ["--num-prompts", "6", "--input-len", "10", "--output-len", "6", "--plot", str(path)]
    assert main(["bench", "serve", "--base-url", server.url, *options]) == 0
    text = path.read_text()
    assert text.startswith("<?xml") and text.count("<path") > 10
    options[-1] = str(tmp_path / "failed.svg")
    assert main(["bench", "serve", "--base-url", server.url, *options, "--input-len", "100000"]) == 1


def test_a_plot_without_matplotlib(monkeypatch, capsys, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert main(["bench", "serve", "--plot", str(tmp_path / "x.svg")]) == 1
    assert "pip install matplotlib" in capsys.readouterr().err


MODELS = [(200, [b'{"data": [{"id": "m"}]}'])]


def streamed(tokens, *, first=(), usage=True, end=b"data: [DONE]\n\n"):
    """An answer's status and pieces, an event for each token."""
    events = [{"choices": [{"text": "a", "token_ids": [1]}]}] * tokens
    if usage:
        events.append({"choices": [], "usage": {"completion_tokens": tokens}})
    return 200, [*first, *(b"data: %s\n\n" % json.dumps(event).encode() for event in events), end]


def bench_fake(answers, *options, path="", base_path="", models=MODELS):
    """Exit status; ``answers`` are those after the first request, which only warms up, with two tokens."""
    routes = {f"{path}/v1/models": models, f"{path}/v1/completions": [streamed(2), *answers]}
    with fake_server(routes) as url:
        options = ["--num-prompts", "3", "--output-len", "4", "--max-concurrency", "1", *options]
        return main(["bench", "serve", "--base-url", url + base_path, *options])


def test_lines_are_read_wherever_they_are_cut():
    class Content:
        def __init__(self, *pieces):
            self.pieces = pieces

        async def iter_any(self):
            for piece in self.pieces:
                yield piece

    async def read(*pieces):
        return [line async for line in lines(Content(*pieces))]

    text = b"data: one\r\n\ndata: two\nlast"
    for size in (1, 2, 5, 100):
        pieces = [text[at : at + size] for at in range(0, len(text), size)]
        assert asyncio.run(read(*pieces)) == [b"data: one\r", b"", b"data: two", b"last"]
    assert asyncio.run(read(b"a\n", b"", b"b\n")) == [b"a", b"b"] and asyncio.run(read()) == []


def test_an_event_with_a_long_prompt(capsys):
    """aiohttp refuses to read such a line."""
    prompt = {"choices": [{"text": "", "prompt_token_ids": [123456] * 100_000}]}
    long = [b"data: ", json.dumps(prompt).encode(), b"\n\n"]
    assert bench_fake([streamed(4, first=long, end=b"data: [DONE]")]) == 0, capsys.readouterr().err


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ((200, [b'data: {"error": "overloaded"}\n\n']), "overloaded"),
        ((200, [b'data: {"error": {"message": "no room"}}\n\n']), "no room"),
        ((200, [b'data: {"error": {"code": 7}}\n\n']), '{"code": 7}'),
        ((200, [b'data: {"usage": null}\n\n']), "cannot be read (KeyError: 'choices'): {\"usage\": null}"),
        ((200, [b"data: {broken\n\n"]), "cannot be read (JSONDecodeError"),
        ((200, [b"data: [1]\n\n"]), "cannot be read (AttributeError"),
        ((200, [b'data: {"choices": [], "usage": {"completion_tokens": 4}}\n\n']), "no event with tokens"),
        ((200, [b"<html>"]), "0 tokens came instead of 4"),
        (streamed(3), "3 tokens came instead of 4"),
        ((503, [b'{"error": "busy"}']), "status 503: busy"),
    ],
)
def test_an_answer_that_nobody_expects_is_one_failed_request(answer, message, capsys, tmp_path):
    path = tmp_path / "result.json"
    assert bench_fake([streamed(4), answer, streamed(4)], "--output-json", str(path)) == 1
    report = json.loads(path.read_text())
    assert (report["num_requests"], report["failed_requests"], report["output_tokens"]) == (2, 1, 8)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: 1 of 3 requests failed, the first with: ") and message in line


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ((401, [b'{"error": {"message": "give an API key"}}']), "give an API key (status 401)"),
        ((500, [b"<html>"]), "<html> (status 500)"),
        ((200, [b'{"data": []}']), "brought no list of models, but: {"),
        ((200, [b"[]"]), "brought no list of models, but: []"),
    ],
)
def test_a_server_that_does_not_tell_its_models(answer, message, capsys):
    assert bench_fake([], models=[answer]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: --base-url: the server does not tell its models: ") and message in line


@pytest.mark.parametrize(("path", "more"), [("", ""), ("", "/v1"), ("/pre", "/v1"), ("/pre", ""), ("/pre", "/v1/")])
def test_an_address_may_have_a_path_and_v1(path, more, capsys):
    assert bench_fake([streamed(4)], path=path, base_path=path + more) == 0, capsys.readouterr().err


def test_a_run_of_a_trace_does_not_record_what_it_replaces(tmp_path, capsys):
    trace, path = tmp_path / "trace.jsonl", tmp_path / "result.json"
    entries = [{"timestamp": at, "input_length": 7, "output_length": 4} for at in (500, 501)]
    trace.write_text("\n".join(map(json.dumps, entries)))
    with fake_server({"/v1/models": MODELS, "/v1/completions": [streamed(2), streamed(4)]}) as url:
        options = ["--trace", str(trace), "--output-json", str(path)]
        assert main(["bench", "serve", "--base-url", url, *options]) == 0, capsys.readouterr().err
    report = json.loads(path.read_text())
    assert (report["num_requests"], report["prompt_tokens"]) == (2, 14)
    replaced = ("num_prompts", "input_len", "output_len", "random_range_ratio", "request_rate", "burstiness")
    assert {report["arguments"][name] for name in replaced} == {None}
    assert report["arguments"]["seed"] == 0 and report["arguments"]["trace"] == str(trace)


def test_what_holds_without_a_trace(tmp_path, capsys):
    path = tmp_path / "result.json"
    assert bench_fake([streamed(4)], "--output-json", str(path)) == 0, capsys.readouterr().err
    written = json.loads(path.read_text())["arguments"]
    assert (written["num_prompts"], written["input_len"], written["random_range_ratio"]) == (3, 128, 0.0)
    assert (written["burstiness"], written["request_rate"], written["trace"]) == (1.0, None, None)


@pytest.mark.parametrize("option", ["--output-json", "--plot"])
def test_where_results_go_is_looked_at_before_anything_is_sent(option, tmp_path, capsys):
    (tmp_path / "file").touch()
    (tmp_path / "folder.svg").mkdir()
    for path, message in (
        (tmp_path / "folder.svg", "is a folder; name a file in it"),
        (tmp_path / "file" / "x.svg", "cannot be written"),
    ):
        with pytest.raises(SystemExit) as caught:  # nobody listens there
            main(["bench", "serve", "--base-url", "http://127.0.0.1:9", option, str(path)])
        error = capsys.readouterr().err
        assert caught.value.code == 2 and f"{option}: {path}" in error and message in error


class Closed(io.StringIO):
    """A pipe whose reader has gone away."""

    def write(self, text):
        raise BrokenPipeError


def test_files_are_written_though_nobody_reads_the_table(tmp_path, monkeypatch):
    path, plot = tmp_path / "new" / "result.json", tmp_path / "plots" / "run.svg"
    monkeypatch.setattr(sys, "stdout", Closed())
    monkeypatch.setattr("tritonllm.cli.drop_unwritable", lambda: None)
    assert bench_fake([streamed(4)], "--output-json", str(path), "--plot", str(plot)) == 141
    assert json.loads(path.read_text())["num_requests"] == 3 and plot.read_text().startswith("<?xml")
