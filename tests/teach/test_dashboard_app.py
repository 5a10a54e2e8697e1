"""The dashboard of an engine in this process, driven by textual's pilot: the screen, the keys, the outputs after it."""

import asyncio
import functools
import io
import json
import logging
import re
import threading
import time

import pytest
from support.engines import greedy, tiny_checkpoint, tiny_llm, token_ids
from support.waiting import PATIENCE

from tritonllm.cli import dashboard as command
from tritonllm.cli import main
from tritonllm.config.sampling_params import SamplingParams
from tritonllm.events import Part, RequestAdded, StepPlanned
from tritonllm.teach.dashboard import picture, source_engine
from tritonllm.teach.dashboard.app import Dashboard, Panel
from tritonllm.teach.dashboard.source import Status
from tritonllm.teach.dashboard.source_engine import DashboardViewer, EngineSource
from tritonllm.telemetry.activity_state import State
from tritonllm.telemetry.recorder import SPEEDS, Gate

PROMPT = list(range(5, 25))


def drive(app, script, size=(80, 24)):
    """Open the screen without a terminal, and do what the script says."""

    async def run():
        async with app.run_test(size=size) as pilot:
            await pilot.pause()
            await script(pilot)

    asyncio.run(run())


async def until(pilot, condition):
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, "it never came true"
        await pilot.pause(0.02)


def shown(app, name):
    """The text of a panel, its title first."""
    panel = app.query_one(f"#{name}")
    return f"{panel.border_title or ''}\n{panel.render().plain}"


class Working:
    """An engine that works in a thread, with requests a, b, ..."""

    def __init__(self, requests=3, tokens=40, speed=0.0, **options):
        self.llm = tiny_llm(**{"async_scheduling": False, **options})
        self.gate = Gate(speed)
        self.source = EngineSource(self.llm.engine, self.gate, "tiny")
        for number in range(requests):
            self.llm.engine.add_request("abcdefgh"[number], PROMPT, greedy(tokens))
        self.thread = threading.Thread(target=self.work)

    def work(self):
        while self.llm.engine.has_unfinished_requests():
            self.llm.engine.step()
        self.source.work_ended = True

    def __enter__(self):
        self.thread.start()
        return self

    def __exit__(self, *_):
        self.gate.close()
        self.thread.join()

    @property
    def steps(self):
        return self.llm.engine._steps


def test_pause_one_step_and_speed():
    with Working(requests=1, tokens=200, speed=SPEEDS[2]) as working:
        app = Dashboard(working.source, every=0.05)

        async def script(pilot):
            await until(pilot, lambda: app.snapshot.counters.steps >= 2)
            await pilot.press("space")
            await pilot.pause(0.1)
            stopped = working.steps
            await pilot.pause(0.2)
            assert 0 < working.steps == stopped < 200
            assert "paused" in app.query_one("#headline").render().plain
            for more in (1, 2):
                await pilot.press("n")
                await until(pilot, lambda more=more: working.steps == stopped + more)
                await until(pilot, lambda more=more: app.snapshot.steps[-1].step == stopped + more)
            await pilot.pause(0.1)
            assert working.steps == stopped + 2 and working.gate.is_paused
            await pilot.press("minus")
            assert working.gate.speed == SPEEDS[3] and "10 steps/s" in app.query_one("#headline").render().plain
            await pilot.press("plus", "plus", "plus")
            assert working.gate.speed == 0.0
            await pilot.press("space")
            await until(pilot, lambda: working.source.work_ended)
            await until(pilot, lambda: "all requests have ended" in app.query_one("#headline").render().plain)

        drive(app, script)
        assert app.snapshot.counters.generated_tokens == 200


def test_what_the_screen_shows():
    working = Working(requests=3, max_num_seqs=2)
    working.gate.turn()
    with working:
        app = Dashboard(working.source, every=0.05)

        async def script(pilot):
            for _ in range(3):
                await pilot.press("n")
            await until(pilot, lambda: app.snapshot.counters.steps == 4)
            assert "2 running" in shown(app, "counters")
            assert "1 in the queue (all seats are taken)" in shown(app, "counters")
            assert "requests 1 to 3 of 3" in shown(app, "requests")
            rows = [line.split() for line in shown(app, "requests").split("\n")[2:]]
            assert [(row[1], row[2]) for row in rows] == [("a", "decode"), ("b", "decode"), ("c", "waiting")]
            used = 64 - working.llm.engine._scheduler.pool.num_free
            assert f"{used} of 64 blocks used, one a cell" in shown(app, "pool") and used > 0
            assert "shared 4" in shown(app, "pool") and "▚" in shown(app, "pool"), "b found a's blocks"
            assert "steps 1 to 4" in shown(app, "steps") and "decode 2" in shown(app, "steps")
            assert "█" in shown(app, "steps")
            for size, wide in (
                ((140, 40), True),
                ((30, 8), False),
                ((5, 3), False),
                ((200, 60), True),
                ((80, 24), False),
            ):
                await pilot.resize_terminal(*size)
                await pilot.pause()
                assert app.screen.has_class("wide") == wide
                app.look()
            await pilot.press("t")
            assert app.theme == "textual-light"
            await pilot.press("t")
            assert app.theme == "textual-dark"

        drive(app, script)


def test_a_picture(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with Working(requests=1) as working:
        app = Dashboard(working.source)
        drive(app, lambda pilot: pilot.press("s"))
    assert "</svg>" in (tmp_path / "tritonllm-dashboard.svg").read_text()


def test_the_picture_of_the_docs(monkeypatch):
    monkeypatch.setattr(picture, "STEPS", 30)
    svg = picture.draw()
    assert "request-12" in svg and "demonstration" in svg
    assert "@font-face" not in svg and set(re.findall(r"https?://[^\s\"/]*", svg)) <= {
        "http://www.w3.org",
        "https://www.textualize.io",
    }


class Told:
    """A source of events that a test makes up."""

    title, gate, is_over = "told", None, False

    def __init__(self, *events):
        self.state = State()
        for event in events:
            self.state.follow(event)

    def look(self, view):
        return self.state.look(view, 0.0)

    def status(self):
        return Status("running", "running")


def many():
    """A thousand requests, of which 256 run with 64 blocks each, of a hundred thousand."""
    params = SamplingParams(max_tokens=500)
    for number in range(1000):
        yield RequestAdded(0.0, f"request-{number}", (f"request-{number}",), tuple(range(1000)), params)
    parts = [
        Part(
            f"request-{n}",
            f"request-{n}",
            "prefill",
            0,
            32,
            0,
            False,
            1000,
            1000,
            True,
            0,
            tuple(range(64 * n, 64 * n + 64)),
            64,
        )
        for n in range(256)
    ]
    yield StepPlanned(
        *(0.0, 0.001, 1, tuple(parts), (), (), (), (), 8192, 256, 744, "seats", 100_000, 83_616, 0, 0, {}, ()),
    )


def test_a_thousand_requests_and_a_hundred_thousand_blocks():
    app = Dashboard(Told(*many()))

    async def script(pilot):
        assert "16,384 of 100,000 blocks used, " in shown(app, "pool") and " a cell\n" in shown(app, "pool")
        title = shown(app, "requests").split("\n")[0]
        assert title.startswith("requests 1 to ") and title.endswith("of 1,000")
        await pilot.press("end")
        assert "to 1,000 of 1,000" in shown(app, "requests") and "request-999" in shown(app, "requests")
        await pilot.press("up")
        assert "to 999 of 1,000" in shown(app, "requests")
        await pilot.press("home", "down", "pagedown", "pageup")
        assert "requests 2 to" in shown(app, "requests")
        await pilot.press("space", "n", "plus")  # keys without a use here do no harm

    drive(app, script)


def test_nothing_yet():
    app = Dashboard(Told())

    async def script(pilot):
        assert "no requests yet" in shown(app, "requests") and "no step yet" in shown(app, "steps")
        assert len(app.query(Panel)) == 4

    drive(app, script)


# The command, with a screen that a script drives.


def piloted(script):
    class Piloted(Dashboard):
        def run(self, **kwargs):
            return super().run(headless=True, size=(80, 24), auto_pilot=functools.partial(script, self), **kwargs)

    return Piloted


@pytest.fixture
def generate(monkeypatch, capsys):
    """``tritonllm generate --dashboard`` with the script at the keys: its exit status, stdout and stderr."""
    monkeypatch.setattr(command, "check", lambda: None)
    llm = tiny_llm(async_scheduling=False)

    def run(script, *argv):
        viewer = functools.partial(DashboardViewer, make_app=piloted(script))
        monkeypatch.setattr(source_engine, "DashboardViewer", viewer)
        prompts = ["--prompt", "a b c", "--prompt", "d e"]
        status = main(["generate", *prompts, "--ignore-eos", *argv], make_llm=lambda *_, **__: llm)
        assert not llm.engine.has_unfinished_requests() and not llm.engine._events.heard, "nothing is left behind"
        return status, capsys.readouterr()

    return run


async def quit_at_the_end(app, pilot):
    await until(pilot, lambda: app.source.work_ended)
    await pilot.press("q")


def test_the_same_outputs_with_a_dashboard(generate, capsys):
    argv = ["--max-tokens", "12", "--n", "2", "--temperature", "1", "--seed", "3", "--json"]
    status, shown = generate(quit_at_the_end, "--dashboard", *argv)
    assert status == 0
    plain = tiny_llm(async_scheduling=False)
    prompts = ["--prompt", "a b c", "--prompt", "d e"]
    assert main(["generate", *prompts, "--ignore-eos", *argv], make_llm=lambda *_, **__: plain) == 0
    with_it, without = (
        [[one["token_ids"] for one in json.loads(line)["outputs"]] for line in text.splitlines()]
        for text in (shown.out, capsys.readouterr().out)
    )
    assert with_it == without and len(with_it) == 2
    assert "generated tokens" in shown.err


@pytest.mark.parametrize("key", ["q", "ctrl+c"])
def test_who_quits_before_the_end_gets_what_there_is(generate, key):
    async def script(app, pilot):
        await until(pilot, lambda: app.snapshot.counters.generated_tokens >= 4)
        await pilot.press("space", key)

    argv = ["--dashboard", "--dashboard-speed", "50", "--max-tokens", "400", "--json"]
    status, shown = generate(script, *argv)
    outputs = [json.loads(line)["outputs"][0] for line in shown.out.splitlines()]
    assert status == 130 and "interrupted" in shown.err
    assert [output["finish_reason"] for output in outputs] == ["abort", "abort"]
    assert all(0 < len(output["token_ids"]) < 400 for output in outputs)


def test_texts_are_printed_when_it_is_closed(generate):
    status, shown = generate(quit_at_the_end, "--dashboard", "--max-tokens", "3")
    assert status == 0 and shown.out.startswith("=== 1/2: a b c\n") and "=== 2/2: d e\n" in shown.out


def test_beams(generate):
    status, shown = generate(quit_at_the_end, "--dashboard", "--beam-width", "2", "--max-tokens", "3", "--json")
    assert status == 0 and len(json.loads(shown.out.splitlines()[0])["outputs"]) == 2


class Broken(Dashboard):
    def run(self, **kwargs):
        return super().run(headless=True, **kwargs)

    def look(self):
        raise ZeroDivisionError("no such colour")


def test_what_fails_is_an_error_and_nothing_hangs(caplog):
    llm = tiny_llm()
    with pytest.raises(RuntimeError, match="the dashboard failed"):
        DashboardViewer(make_app=Broken).run(llm, lambda: llm.generate([PROMPT], greedy(3), use_tqdm=False))
    with pytest.raises(ValueError, match="prompt"):
        DashboardViewer(make_app=piloted(quit_at_the_end)).run(llm, lambda: llm.generate([[]], greedy(3)))
    assert token_ids(llm.generate([PROMPT], greedy(3), use_tqdm=False)) and not llm.engine._events.heard


def test_messages_wait_until_the_screen_is_closed():
    stream, logger = io.StringIO(), logging.getLogger("tritonllm")
    handler = logging.StreamHandler(stream)
    logger.addHandler(handler)
    try:
        with source_engine.logs_held():
            logger.warning("the cache is small")
            assert stream.getvalue() == ""
        assert stream.getvalue() == "the cache is small\n" and handler.stream is stream
    finally:
        logger.removeHandler(handler)


def test_a_gate_lets_so_many_steps_through():
    gate, passed = Gate(), []

    def work():
        for number in range(6):
            gate.wait()
            passed.append(number)

    gate.let_one()
    gate.let_one()
    thread = threading.Thread(target=work)
    thread.start()
    end = time.monotonic() + PATIENCE
    while len(passed) < 2:
        assert time.monotonic() < end
    time.sleep(0.05)
    assert passed == [0, 1] and gate.is_paused
    gate.turn()
    thread.join()
    assert passed == list(range(6))
    gate.change_speed(-1)
    assert gate.speed == 0.0
    gate.change_speed(100)
    assert gate.speed == SPEEDS[-1]
    gate.close()
    gate.wait()
    gate.wait()


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--dashboard-speed", "3"], "--dashboard-speed needs --dashboard"),
        (["--dashboard", "--dashboard-speed", "0"], "above 0"),
        (["--dashboard", "--dashboard-speed", "nan"], "above 0"),
        (["--dashboard"], "needs a terminal"),
    ],
)
def test_wrong_usage(argv, says, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["generate", str(tiny_checkpoint()), "--prompt", "a", *argv])
    assert stopped.value.code == 2 and says in capsys.readouterr().err


def test_it_has_the_terminal_for_itself(monkeypatch, capsys):
    monkeypatch.setattr(command, "check", lambda: None)
    with pytest.raises(SystemExit) as stopped:
        main(["generate", str(tiny_checkpoint()), "--prompt", "a", "--dashboard", "--xray"])
    assert stopped.value.code == 2 and "the terminal for itself" in capsys.readouterr().err


def test_without_textual(monkeypatch, capsys):
    monkeypatch.setattr(command, "find_spec", lambda name: None)
    for argv in (["generate", "--prompt", "a", "--dashboard"], ["dashboard"]):
        with pytest.raises(SystemExit) as stopped:
            main(argv)
        assert stopped.value.code == 2 and "pip install '.[teach]'" in capsys.readouterr().err
