"""SIGTERM at any moment of a server's start ends it with status 0, and leaves nothing."""

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress

import pytest
from support import forked_programs
from support.engines import tiny_checkpoint
from support.examples import is_quick
from support.server import ROOT, eventually, socket_folders
from support.streams import all_gone
from support.waiting import PATIENCE

from tritonllm.system.starting import stopped_by_sigterm

# Says when the command has begun: before that Python imports, and the signal does what it does to any program.
SCRIPT = """
import sys
from tritonllm.cli import main, serve
check = serve.check
serve.check = lambda args: (print("begun", flush=True), check(args))[1]
sys.exit(main(sys.argv[1:]))
"""


class Starting:
    """``tritonllm serve`` from the moment on at which the command has begun."""

    def __init__(self, *options):
        words = ["serve", str(tiny_checkpoint()), "--device", "cpu", "--port", "0", "--skip-tokenizer-init", *options]
        pipe = subprocess.PIPE
        command = [sys.executable, "-c", SCRIPT, *words, "--num-blocks", "64"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        self.process = forked_programs.Popen(command, cwd=ROOT, env=environment, stdout=pipe, stderr=pipe, text=True)
        assert self.process.stdout.readline() == "begun\n"
        self.begun = time.monotonic()

    def seconds(self):
        """Until it serves."""
        for line in self.process.stderr:
            if " serving " in line:
                return time.monotonic() - self.begun
        raise AssertionError("it did not start")

    def stop(self):
        """Its status, and what it says; nobody that it has started is left."""
        started = forked_programs.children(self.process.pid, recursive=True)
        self.process.terminate()
        said = self.process.communicate(timeout=PATIENCE)[1]
        eventually(lambda: all_gone(started))
        return self.process.returncode, said


@pytest.mark.parametrize(
    "options",
    [
        (),
        pytest.param(("--tensor-parallel-size", "2"), marks=pytest.mark.long),
        pytest.param(("--data-parallel-size", "2"), marks=pytest.mark.long),
        pytest.param(("--api-server-count", "2"), marks=pytest.mark.long),
    ],
    ids=lambda options: " ".join(options) or "one process",
)
def test_sigterm_at_any_moment_of_the_start(options):
    """So that one comes in each part of it: after so many parts of the time that it takes."""
    before, first = socket_folders(), Starting(*options)
    whole, moments = first.seconds(), 5 if is_quick() else 10 if options else 25
    assert first.stop()[0] == 0
    for number in range(moments):
        starting = Starting(*options)
        time.sleep(whole * number / (moments - 1))
        status, said = starting.stop()
        assert status == 0 and "Traceback" not in said, said
    eventually(lambda: socket_folders() <= before)


def swallow():
    """As what a library calls back, whose exceptions are told and forgotten."""
    with suppress(SystemExit):
        os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.parametrize("where", ["asked", "end", "error"])
def test_a_signal_that_was_swallowed_is_not_forgotten(where):
    before, passed = signal.getsignal(signal.SIGTERM), []
    with pytest.raises(SystemExit) as ended, stopped_by_sigterm("stopped") as check:
        check()
        swallow()
        if where == "asked":
            check()
            passed.append(1)
        elif where == "error":
            raise ImportError("initialization failed")
    assert ended.value.code == 0 and not passed
    assert signal.getsignal(signal.SIGTERM) is before
