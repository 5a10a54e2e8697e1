import gc
import os
import signal
import subprocess
import sys

import pytest

from tritonllm.system.starting import later, no_searches, run_spawned


@pytest.fixture(autouse=True)
def searches():
    """Whatever a test does, the next one has searches."""
    yield
    gc.enable()


@pytest.mark.parametrize("before", [True, False])
def test_searches_go_on_as_before(before):
    gc.enable() if before else gc.disable()
    with no_searches():
        assert not gc.isenabled()
    assert gc.isenabled() == before
    with pytest.raises(ImportError), no_searches():
        raise ImportError
    assert gc.isenabled() == before


def test_what_users_have_is_still_searched(monkeypatch):
    frozen = []
    monkeypatch.setattr(gc, "freeze", lambda: frozen.append(gc.isenabled()))
    with no_searches():
        pass
    assert frozen == []
    with no_searches(ours=True):
        pass
    assert frozen == [False]  # before a search


@pytest.mark.parametrize(("triton", "searched"), [(None, False), ("3.6.0", False), ("3.9.0", True), ("3.10.1", True)])
def test_only_bindings_that_print_what_has_leaked_are_taken_apart_at_the_end(triton, searched):
    program = (
        "import atexit, gc, sys, types\n"
        "atexit.register(lambda: print(gc.get_freeze_count() == 0))\n"  # the first one runs last
        "from tritonllm.system.starting import leave_out_of_searches, no_searches\n"
        "with no_searches(ours=True): pass\n"
        "leave_out_of_searches()\n"
        "print(gc.get_freeze_count() > 1000)\n"
        f"sys.modules |= {{}} if {triton!r} is None else {{'triton': types.SimpleNamespace(__version__={triton!r})}}\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", str(searched)]


def test_a_spawned_process_imports_its_function_without_searches(tmp_path, monkeypatch):
    (tmp_path / "of_a_new_process.py").write_text(
        "import gc\nwhile_imported = gc.isenabled()\n"
        "def main(told, more):\n    told.append((while_imported, gc.isenabled(), more))\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(gc, "freeze", lambda: None)
    told = []
    run_spawned("of_a_new_process", "main", told, 5)
    del sys.modules["of_a_new_process"]
    assert told == [(False, True, 5)]


def test_signals_come_when_what_they_must_not_break_off_is_done():
    done = []

    def stop(number, frame):
        done.append("stopped")
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, stop)
    try:
        with pytest.raises(KeyboardInterrupt), later(signal.SIGINT):
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)
            done.append("done")
        assert done == ["done", "stopped"] and signal.getsignal(signal.SIGINT) is stop
    finally:
        signal.signal(signal.SIGINT, before)
