"""The dashboard on a terminal, as a person has it."""

import os
import re
import signal
import sys
from pathlib import Path

import pexpect
import pytest
from support.waiting import PATIENCE

from tritonllm import LLM, SamplingParams
from tritonllm.demo import model_path

ROOT = Path(__file__).parents[2]
OPENS, CLOSES, SHOWS_CURSOR = "\x1b[?1049h", "\x1b[?1049l", "\x1b[?25h"
ASK = ["generate", "--prompt", "There was a fox named", "--ignore-eos", "--dashboard"]


def spawn(*argv):
    environment = {**os.environ, "TERM": "xterm-256color", "OMP_NUM_THREADS": "1"}
    environment.pop("NO_COLOR", None)
    child = pexpect.spawn(
        *(sys.executable, ["-m", "tritonllm", *argv]),
        cwd=ROOT,
        env=environment,
        dimensions=(24, 80),
        encoding="utf-8",
        timeout=PATIENCE,
    )
    child.expect_exact(OPENS)
    return child


def closed(child):
    """What is on the terminal after the screen is gone; the terminal is as it was."""
    child.expect_exact(CLOSES)
    child.expect(pexpect.EOF)
    rest = child.before
    child.close()
    assert SHOWS_CURSOR in rest
    return re.sub(r"\x1b\[[?\d;<>=]*[a-z]", "", rest)


def test_a_session():
    child = spawn(*ASK, "--max-tokens", "30", "--dashboard-speed", "20")
    child.expect_exact("running")
    child.send(" ")
    child.expect_exact("paused")
    child.send("n")
    child.setwinsize(40, 140)
    child.send(" ")
    child.expect_exact("all requests have ended")
    child.send("q")
    rest = closed(child)
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    (output,) = LLM(str(model_path())).generate(["There was a fox named"], params, use_tqdm=False)
    assert output.outputs[0].text in rest.replace("\r\n", "\n")
    assert "30 generated tokens" in rest
    assert child.exitstatus == 0


@pytest.mark.long
def test_a_signal_leaves_the_terminal_as_it_was():
    child = spawn(*ASK, "--max-tokens", "500", "--dashboard-speed", "5")
    child.expect_exact("decode")
    child.kill(signal.SIGINT)
    rest = closed(child)
    assert "interrupted" in rest and "Traceback" not in rest
    assert child.exitstatus == 130


def test_a_server_that_is_not_there():
    child = spawn("dashboard", "--url", "http://127.0.0.1:1")
    child.expect_exact("no answer yet")
    child.send("q")
    assert closed(child).strip() == "" and child.exitstatus == 0
