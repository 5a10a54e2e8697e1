"""Programs of tests that are forks are what Python would make of their command lines."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import psutil
import pytest
from support import forked_programs
from support.streams import all_gone
from support.waiting import eventually

WHAT = """
import json, multiprocessing, os, subprocess, sys
print(json.dumps({
    "arguments": sys.argv, "name": __name__, "path": sys.path[0], "cwd": os.getcwd(), "variable": os.environ["SAYS"],
    "files": len(os.listdir("/proc/self/fd")), "parent": os.getppid(), "imported": "torch" in sys.modules,
    "below": subprocess.check_output([sys.executable, "-c", "import sys; print('torch' in sys.modules)"], text=True),
}))
print("said", input(), file=sys.stderr)
sys.exit(7)
"""
SPAWNS = """
import multiprocessing, os, sys, time

def work(parent):
    print(os.getppid() == parent and "torch" in sys.modules, flush=True)
    time.sleep(3600)

if __name__ == "__main__":
    multiprocessing.get_context("spawn").Process(target=work, args=(os.getpid(),)).start()
"""


@pytest.mark.parametrize("kind", ["file", "module", "text"])
def test_as_python_does_it(tmp_path, kind):
    (tmp_path / "what.py").write_text(WHAT)
    words = {"file": ["what.py"], "module": ["-m", "what"], "text": ["-c", WHAT]}[kind]
    environment = {**os.environ, "SAYS": "so"}
    forked, plain = (
        run([sys.executable, *words, "a b"], input="this", env=environment, cwd=tmp_path, **options)
        for run, options in ((forked_programs.run, {}), (subprocess.run, {"capture_output": True, "text": True}))
    )
    assert (forked.returncode, forked.stderr) == (plain.returncode, plain.stderr) == (7, "said this\n")
    told, expected = json.loads(forked.stdout), json.loads(plain.stdout)
    assert told.pop("imported") and not expected.pop("imported")
    assert (told.pop("below"), expected.pop("below")) == ("True\n", "False\n")
    assert told.pop("files") == expected.pop("files") + 1  # a socket, to what forks for it
    assert told == expected and told["parent"] == os.getpid()


def test_threads_that_are_the_first_to_start_some_share_what_forks(monkeypatch):
    """Else each had one, and one's children could become orphans while the other forked."""
    started = []

    def start():
        started.append(threading.get_ident())
        time.sleep(0.1)  # the other thread has asked by then
        return forks()

    forks = forked_programs._start.__wrapped__
    monkeypatch.setattr(forked_programs, "_start", cache(start))
    monkeypatch.setattr(forked_programs, "_execute_child", forked_programs._execute_child.__wrapped__)
    ask = "import os; print(os.getppid())"
    with ThreadPoolExecutor(2) as threads:
        done = list(threads.map(lambda _: forked_programs.run([sys.executable, "-c", ask]), range(2)))
    assert [one.stdout for one in done] == [f"{os.getpid()}\n"] * 2 and len(started) == 1


def test_variables_that_are_read_at_import_make_it_begin_plainly():
    program = "import sys; print('torch' in sys.modules)"
    environment = {**os.environ, "TRITONLLM_CPU_BACKEND": "reference"}
    assert forked_programs.run([sys.executable, "-c", program], env=environment).stdout == "False\n"


def test_what_it_spawns_is_a_fork_too_and_ends_with_a_signal(tmp_path):
    (tmp_path / "spawns.py").write_text(SPAWNS)
    command = [sys.executable, str(tmp_path / "spawns.py")]
    with forked_programs.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
        assert process.stdout.readline() == "True\n"
        below = psutil.Process(process.pid).children(recursive=True)
        os.killpg(process.pid, signal.SIGTERM)
        assert process.wait() == -signal.SIGTERM
    eventually(lambda: all_gone(below))
