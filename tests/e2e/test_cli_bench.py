"""``tritonllm bench`` with the model of the package, on the CPU path."""

import io
import json
import sys

import pytest

from tritonllm.cli import bench, bench_files, bench_runs, build_parser, main
from tritonllm.offline.llm import LLM

pytestmark = pytest.mark.long

SMALL = {
    "throughput": ["--num-prompts", "3", "--input-len", "10", "--output-len", "4", "--random-range-ratio", "0.5"],
    "latency": ["--batch-size", "2", "--input-len", "5", "--output-len", "3", "--num-iters", "4"],
    "prefix": ["--num-prompts", "2", "--prefix-len", "64", "--input-len", "5", "--output-len", "2"],
    "prefill": ["--num-prompts", "2", "--input-len", "40"],
}
ENGINE = ["--device", "cpu", "--num-blocks", "64"]


@pytest.fixture
def started(monkeypatch):
    """The options of the engines that were started."""
    seen = []

    def make(model, **options):
        seen.append(options)
        return LLM(model, **options)

    return seen, make


def run(kind, tmp_path, make, *more):
    out = tmp_path / "new" / "result.json"
    code = main(["bench", kind, *SMALL[kind], *ENGINE, "--output-json", str(out), *more], make_llm=make)
    assert code == 0
    return json.loads(out.read_text())


@pytest.mark.parametrize("kind", SMALL)
def test_results_say_what_they_are_of(kind, tmp_path, started, capsys):
    seen, make = started
    result = run(kind, tmp_path, make, "--max-num-seqs", "4", "--max-num-batched-tokens", "32", "--seed", "7")
    assert (result["benchmark"], result["device"]) == (kind, "cpu") and result["start_seconds"] > 0
    assert result["versions"].keys() == {"tritonllm", "torch"} and result["model"].endswith("model")
    arguments = result["arguments"]
    assert arguments["max_num_seqs"] == 4 and arguments["seed"] == 7 and arguments["input_len"] in (5, 10, 40)
    given = {"device": "cpu", "num_blocks": 64, "max_num_seqs": 4, "max_num_batched_tokens": 32}
    assert seen == [given | {"skip_tokenizer_init": True}]
    captured = capsys.readouterr()
    assert captured.out.startswith(f"bench {kind}: ") and "time to first token, ms, median" in captured.out
    assert captured.err.startswith("ready after ")


@pytest.mark.smoke
def test_throughput(tmp_path, started, capsys):
    result = run("throughput", tmp_path, started[1])
    assert result["num_requests"] == 3 and 15 <= result["prompt_tokens"] <= 45 and 6 <= result["output_tokens"] <= 18
    seconds = result["elapsed_time"]
    assert result["requests_per_second"] == pytest.approx(3 / seconds)
    assert result["output_tokens_per_second"] == pytest.approx(result["output_tokens"] / seconds)
    assert result["tokens_per_second"] == pytest.approx((result["prompt_tokens"] + result["output_tokens"]) / seconds)
    first = result["time_to_first_token_ms"]["percentiles"]
    assert 0 < first["10"] <= first["50"] <= first["99"] <= 1e3 * seconds
    lines = dict(line.rsplit(None, 1) for line in capsys.readouterr().out.splitlines()[1:])
    assert lines["requests"] == "3" and float(lines["output tokens/s"].replace(",", "")) > 0


def test_same_seed_same_requests():
    def lengths(seed):
        source = bench_runs.Bench(None, 100, 0.0, seed)
        return [(source.vary(50, 0.5), source.tokens(3)) for _ in range(20)]

    assert lengths(1) == lengths(1) != lengths(2)
    assert all(25 <= length <= 75 and max(tokens) < 100 for length, tokens in lengths(1))


def test_latency(tmp_path, started):
    result = run("latency", tmp_path, started[1])
    assert len(result["latencies"]) == 4 and result["avg_latency"] == pytest.approx(sum(result["latencies"]) / 4)
    assert result["percentiles"].keys() == {"10", "25", "50", "75", "90", "99"}
    assert min(result["latencies"]) <= result["percentiles"]["50"] <= max(result["latencies"])
    assert result["time_per_output_token_ms"]["mean"] > 0


def test_prefix(tmp_path, started, capsys):
    result = run("prefix", tmp_path, started[1], "--repeat-count", "2")
    cold, warm = result["cold"], result["warm"]
    assert warm["cached_tokens"] == 2 * 64 and warm["cached_share"] == pytest.approx(128 / 138)
    assert cold["cached_tokens"] <= 64 and cold["num_requests"] == warm["num_requests"] == 2
    header = capsys.readouterr().out.splitlines()[1].split()
    assert header == ["cold", "warm"]


def test_prefill(tmp_path, started, capsys):
    result = run("prefill", tmp_path, started[1])
    assert result["prompt_tokens"] == 80 and result["output_tokens"] == 2
    assert result["prompt_tokens_per_second"] == pytest.approx(80 / result["elapsed_time"])
    assert result["time_per_output_token_ms"] is None and "per output token" not in capsys.readouterr().out


def test_no_file_without_output_json(tmp_path, started, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["bench", "prefill", *SMALL["prefill"], *ENGINE], make_llm=started[1]) == 0
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("kind", "argv", "says"),
    [
        ("throughput", ["--num-prompts", "0"], "--num-prompts must be at least 1, got 0"),
        ("throughput", ["--random-range-ratio", "1.5"], "--random-range-ratio must be from 0 to 1, got 1.5"),
        ("latency", ["--num-iters-warmup", "-1"], "--num-iters-warmup must be at least 0, got -1"),
        ("prefix", ["--output-len", "0"], "--output-len must be at least 1"),
        ("prefill", ["--temperature", "-1"], "--temperature must be at least 0"),
        ("prefill", ["--block-size", "0"], "block_size must be an integer of at least 1"),
        ("prefill", ["--output-len", "3"], "unrecognized arguments"),
        ("decode", [], "invalid choice"),
    ],
)
def test_wrong_usage_is_found_before_a_model_is_loaded(kind, argv, says, started, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["bench", kind, *argv], make_llm=started[1])
    assert stopped.value.code == 2 and says in capsys.readouterr().err
    assert started[0] == []


@pytest.mark.parametrize("kind", SMALL)
def test_where_results_go_is_looked_at_before_a_model_is_loaded(kind, tmp_path, started, capsys):
    (tmp_path / "file").touch()
    for path, message in ((tmp_path, "is a folder; name a file in it"), (tmp_path / "file" / "x", "cannot be written")):
        with pytest.raises(SystemExit) as stopped:
            main(["bench", kind, *ENGINE, "--output-json", str(path)], make_llm=started[1])
        error = capsys.readouterr().err
        assert stopped.value.code == 2 and f"--output-json: {path}" in error and message in error
    assert started[0] == []


@pytest.mark.parametrize("there", [False, True])
def test_looking_at_a_file_leaves_it_as_it_is(there, tmp_path):
    path = tmp_path / "new" / "result.json"
    if there:
        path.parent.mkdir()
        path.write_text("before")
    bench_files.check_file("--output-json", path)
    assert [file.read_text() for file in path.parent.iterdir()] == ["before"] * there


def test_a_file_that_may_not_be_written(tmp_path, monkeypatch):
    path = tmp_path / "result.json"
    path.touch()
    monkeypatch.setattr("os.access", lambda *_: False)  # as root may write everything
    with pytest.raises(ValueError, match=r"--output-json: .* cannot be written"):
        bench_files.check_file("--output-json", path)


class Closed(io.StringIO):
    """A pipe whose reader has gone away."""

    def write(self, text):
        raise BrokenPipeError


def test_the_file_is_written_though_nobody_reads_the_table(tmp_path, started, monkeypatch):
    monkeypatch.setattr(sys, "stdout", Closed())
    monkeypatch.setattr("tritonllm.cli.drop_unwritable", lambda: None)
    path = tmp_path / "result.json"
    argv = ["bench", "prefill", *SMALL["prefill"], *ENGINE, "--output-json", str(path)]
    assert main(argv, make_llm=started[1]) == 141
    assert json.loads(path.read_text())["prompt_tokens"] == 80


def test_a_prompt_that_does_not_fit_is_an_error_in_one_line(started, capsys):
    assert main(["bench", "prefill", *ENGINE, "--input-len", "5000"], make_llm=started[1]) == 1
    errors = capsys.readouterr().err.splitlines()
    assert errors[-1].startswith("error: ") and "max_model_len" in errors[-1]


def test_an_output_that_is_cut_off_is_an_error_in_one_line(started, tmp_path, capsys):
    """Its time would be that of fewer tokens than the report says."""
    out = tmp_path / "result.json"
    length = ["--input-len", "2040", "--output-len", "500", "--num-iters", "1", "--batch-size", "1"]
    assert main(["bench", "latency", *length, *ENGINE, "--num-blocks", "300", "--output-json", str(out)]) == 1
    errors = capsys.readouterr().err.splitlines()
    assert errors[-1].startswith("error: an output has 8 tokens instead of 500, behind a prompt of 2040: raise --max-m")
    assert not out.exists()


@pytest.mark.parametrize("kind", SMALL)
def test_help_explains_every_option_and_number(kind, capsys):
    with pytest.raises(SystemExit):
        build_parser().parse_args(["bench", kind, "--help"])
    shown = capsys.readouterr().out
    assert all(f"--{name}" in shown for name in (*bench.LENGTHS[kind], *bench.OPTIONS, "output-json"))
    assert "time to first token" in shown and "time per output token" in shown and "MODEL" in shown


@pytest.mark.parametrize(
    ("values", "expected"), [([5.0], 5.0), ([1.0, 2.0], 1.5), ([4.0, 1.0, 3.0], 3.0), ([1.0, 2.0, 3.0, 10.0], 2.5)]
)
@pytest.mark.smoke
def test_percentiles_interpolate(values, expected):
    found = bench_runs.percentiles(values)
    assert found["50"] == expected and found["10"] <= found["50"] <= found["99"] <= max(values)
