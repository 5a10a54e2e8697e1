"""The commands: a run that writes a trace, and what reads it."""

import builtins
import json
import subprocess
import sys
from pathlib import Path

import pexpect
import pytest
from support.fake_events import FakeEngine, added, ended, one_step
from support.trace_rules import check_trace, load

from tritonllm.cli import main
from tritonllm.telemetry.trace import Trace

ROOT = Path(__file__).parents[2]
RUN = ["generate", "--prompt", "There was a fox named", "--max-tokens", "6", "--num-blocks", "64"]


@pytest.fixture(scope="module")
def trace(tmp_path_factory):
    """One of two requests, each of 40 steps."""
    path, engine = tmp_path_factory.mktemp("trace") / "[mine].json.gz", FakeEngine()
    with Trace(engine, path) as trace:
        begin = trace._clock.start
        engine.tell(added(begin, "a"), added(begin, "[b]"))
        for step in range(1, 41):
            engine.tell(*one_step(begin + 0.012 * step, step, ["a", "[b]"], admitted=step == 1))
        engine.tell(ended(begin + 0.5, "a", begin + 0.03, 40), ended(begin + 0.5, "[b]", begin + 0.03, 40))
    return path


@pytest.mark.parametrize("name", ["a.json", "a.json.gz"])
def test_generate_writes_one(tmp_path, capsys, name):
    path = tmp_path / name
    assert main([*RUN, "--trace", str(path)]) == 0
    with_trace = capsys.readouterr()
    check_trace(load(path))
    assert f"events in {path} | open it at https://ui.perfetto.dev, or run: tritonllm trace {path}]" in with_trace.err
    assert main(["trace", "--json", str(path)]) == 0
    summary = json.loads(capsys.readouterr().out)
    assert [one["output_tokens"] for one in summary["requests"]] == [6] and summary["totals"]["steps"] >= 6
    if name == "a.json":
        assert main(RUN) == 0
        assert capsys.readouterr().out == with_trace.out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--trace", "{tmp}"], "is a folder"),
        (["--trace", "{tmp}/nowhere/a.json"], "there is no folder"),
        (["--trace", "{tmp}/a.json", "--trace-kernels", "-1"], "--trace-kernels must be at least 0"),
        (["--trace-kernels", "3"], "--trace-kernels needs --trace"),
    ],
)
def test_bad_options_of_generate(tmp_path, capsys, options, message):
    with pytest.raises(SystemExit) as error:
        main([*RUN, *(option.format(tmp=tmp_path) for option in options)])
    assert error.value.code == 2 and message in capsys.readouterr().err


def test_a_run_whose_trace_cannot_be_written(capsys):
    assert main([*RUN, "--trace", "/dev/full"]) == 1
    assert "No space left on device" in capsys.readouterr().err


def test_text_in_a_pipe(trace, capsys):
    assert main(["trace", str(trace), "--top", "3"]) == 0
    out = capsys.readouterr().out
    assert "2 requests (0 unfinished), 40 steps" in out and "The 3 slowest steps" in out and "[b]" in out
    assert out.isascii() and "\x1b" not in out


def test_tables_in_a_terminal(trace):
    child = pexpect.spawn(
        sys.executable, ["-m", "tritonllm", "trace", str(trace)], cwd=ROOT, dimensions=(60, 160), encoding="utf-8"
    )
    out = child.read()
    child.close()
    assert child.exitstatus == 0 and "\x1b[" in out and "─" in out
    assert "2 requests (0 unfinished), 40 steps" in out and "[b]" in out


@pytest.mark.parametrize("ending", [".svg", ".png"])
def test_a_picture(trace, tmp_path, capsys, ending):
    picture = tmp_path / f"a{ending}"
    assert main(["trace", str(trace), "--plot", str(picture), "--from", "100", "--to", "300"]) == 0
    assert capsys.readouterr().out == f"wrote {picture}\n"
    data = picture.read_bytes()
    assert b"<svg" in data and b"tokens a step" in data if ending == ".svg" else data.startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--top", "0"], "--top must be at least 1"),
        (["--from", "3"], "--from and --to need --plot"),
        (["--plot", "a.json"], "--plot must name a file that ends with"),
        (["--plot", "a.svg", "--json"], "leave out --json"),
        (["--plot", "a.svg", "--from", "3", "--to", "3"], "--from must be less than --to"),
    ],
)
def test_bad_options(trace, capsys, options, message):
    with pytest.raises(SystemExit) as error:
        main(["trace", str(trace), *options])
    assert error.value.code == 2 and message in capsys.readouterr().err


def test_errors(trace, tmp_path, capsys, monkeypatch):
    (tmp_path / "other.json").write_text('{"traceEvents": []}')
    assert main(["trace", str(tmp_path / "other.json")]) == 1
    assert "is no trace that `tritonllm generate --trace`" in capsys.readouterr().err
    assert main(["trace", str(tmp_path / "none.json")]) == 1
    assert "No such file" in capsys.readouterr().err
    assert main(["trace", str(trace), "--plot", str(tmp_path / "a.svg"), "--from", "1e6"]) == 1
    assert "there is no step between" in capsys.readouterr().err
    imported = builtins.__import__

    def without(name, *args, **kwargs):
        if name.split(".")[0] == "matplotlib":
            raise ImportError("No module named 'matplotlib'")
        return imported(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    assert main(["trace", str(trace), "--plot", str(tmp_path / "a.svg")]) == 1
    assert "pip install '.[teach]'" in capsys.readouterr().err


@pytest.mark.parametrize("command", [["generate", "--help"], ["trace", "{trace}"], ["trace", "{trace}", "--json"]])
def test_needs_no_torch(trace, command):
    """Piped, ``trace`` needs only the standard library, and ``--help`` none of what modes need."""
    script = "import sys; from tritonllm.cli import main\ntry: main(sys.argv[1:])\nexcept SystemExit: pass\n"
    script += "assert not {'torch', 'rich', 'textual', 'matplotlib'} & set(sys.modules), 'imported'"
    arguments = [part.format(trace=trace) for part in command]
    done = subprocess.run([sys.executable, "-c", script, *arguments], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
