"""A rank that dies, stops, hangs or raises: requests end with an error that says which one and why, and no process is
left."""

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import nullcontext
from multiprocessing.context import SpawnProcess
from pathlib import Path

import pytest
from support import forked_programs
from support.checkout import environment
from support.engines import greedy, tiny_checkpoint, tiny_llm, token_ids
from support.imported_processes import imported_processes
from support.ranks import shared_memory
from support.waiting import PATIENCE

from tritonllm.dist.watch import WorkerError
from tritonllm.engine.data.agreement import EVERY
from tritonllm.engine.data.step import FREE
from tritonllm.engine.data.step_bytes import unpack
from tritonllm.engine.ranks import executor

pytestmark = pytest.mark.long

SILENCE = 3.0  # seconds


def start(size=2, *, spawned=True, **kwargs):
    """An engine, and its other ranks; those that are not ``spawned`` have the engine imported."""
    before = set(multiprocessing.active_children())
    with nullcontext() if spawned else imported_processes():
        llm = tiny_llm(**{"tensor_parallel_size": size, "worker_timeout": PATIENCE, **kwargs})
    return llm, sorted(set(multiprocessing.active_children()) - before, key=lambda process: process.name)


def patience_for(number):
    """Only one that has stopped is missed by its silence; a busy machine makes others silent, too."""
    return SILENCE if number == signal.SIGSTOP else PATIENCE


def assert_ended(processes):
    """``join`` does not do: where the engine's watch asks at the same moment, only one of the two is told the status,
    and the other's wait ends before the status is noted."""
    until = time.monotonic() + PATIENCE
    while any(process.exitcode is None for process in processes) and time.monotonic() < until:
        time.sleep(0.01)
    assert all(process.exitcode is not None for process in processes)


def run_into(llm, message, strike=None):
    """Requests run until the failure, which is told to them and to those that come later. ``strike`` is done by another
    thread while steps run."""
    for request_id in ("a", "b"):
        llm.engine.add_request(request_id, [1, 2, 3], greedy(200))
    begin, steps = time.monotonic(), 0
    with pytest.raises(WorkerError, match=message):
        while llm.engine.has_unfinished_requests():
            llm.engine.step()
            steps += 1
            if steps == 20 and strike is not None:
                threading.Thread(target=strike).start()
    assert time.monotonic() - begin < PATIENCE
    outputs = {output.request_id: output for output in llm.engine.step()}
    assert sorted(outputs) == ["a", "b"]
    assert all(o.outputs[0].finish_reason == "error" and "rank" in o.error for o in outputs.values())
    with pytest.raises(WorkerError, match="rank"):
        llm.generate([[1, 2]], greedy(2), use_tqdm=False)


@pytest.mark.parametrize(("number", "reason"), [(signal.SIGKILL, "signal 9"), (signal.SIGSTOP, "silent for 3 s")])
@pytest.mark.parametrize("size", [2, 4])
def test_a_signal_while_steps_run(number, reason, size):
    llm, processes = start(size, spawned=size == 2, worker_timeout=patience_for(number))
    victim = processes[-1]
    said = rf"rank {size - 1} \(process {victim.pid}\) failed after \d+ steps: .*{reason}"
    run_into(llm, said, lambda: os.kill(victim.pid, number))
    assert_ended(processes)


@pytest.mark.parametrize(("number", "reason"), [(signal.SIGKILL, "signal 9"), (signal.SIGSTOP, "silent for 3 s")])
@pytest.mark.parametrize("stage", [1, 2])
def test_a_signal_in_a_pipeline(number, reason, stage):
    """The stages before it have sent it what it will never receive, those behind it wait for it."""
    stages = {"pipeline_parallel_size": 3, "async_scheduling": True, "worker_timeout": patience_for(number)}
    llm, processes = start(1, spawned=stage == 1, **stages)
    victim = processes[stage - 1]
    said = rf"rank {stage} \(process {victim.pid}\) failed after \d+ steps: .*{reason}"
    run_into(llm, said, lambda: os.kill(victim.pid, number))
    assert_ended(processes)


def test_ctrl_c_leaves_a_pipeline_whole(monkeypatch):
    """Steps that were not drawn come back before the next ones."""
    llm, _ = start(1, spawned=False, pipeline_parallel_size=2, async_scheduling=True)
    prompts = [[1, 2], [3, 4, 5], [6]]
    expected = token_ids(llm.generate(prompts, greedy(6), use_tqdm=False))
    runner, undrawn = llm.engine._runner._runner, []
    begin = runner.begin

    def interrupted(step):
        if len(undrawn) == 5:
            os.kill(os.getpid(), signal.SIGINT)
        running = begin(step)
        undrawn.append(runner.undrawn)
        return running

    monkeypatch.setattr(runner, "begin", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(prompts, greedy(20), use_tqdm=False)
    assert undrawn[5] == 2
    assert token_ids(llm.generate(prompts, greedy(6), use_tqdm=False)) == expected


def test_a_step_that_fails_on_the_last_stage():
    drafter = {"method": "support.traps:NeverMade", "num_speculative_tokens": 2}
    llm, _ = start(
        1, spawned=False, pipeline_parallel_size=2, speculative_config=drafter
    )  # drafters are the first stage's alone
    assert llm.generate([[1, 2]], greedy(2), use_tqdm=False)[0].error is None


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_signal_while_nothing_runs(number):
    llm, processes = start(worker_timeout=patience_for(number))
    os.kill(processes[0].pid, number)
    assert_ended(processes)  # the watch ends one that has stopped
    run_into(llm, r"rank 1 .* failed after 0 steps")


@pytest.mark.parametrize(
    ("trap", "reason"),
    [("Raises", "ValueError: 7 is no lucky number"), ("Hangs", r"it has not finished a step for 3 s \(step_timeout\)")],
)
@pytest.mark.smoke
def test_code_that_fails_on_one_rank(trap, reason):
    """A drafter runs on every rank; this one fails on all but the first."""
    drafter = {"method": f"support.traps:{trap}", "num_speculative_tokens": 2}
    llm, processes = start(
        spawned=trap == "Raises", speculative_config=drafter, step_timeout=SILENCE if trap == "Hangs" else PATIENCE
    )
    run_into(llm, rf"rank 1 .* failed after \d+ steps: {reason}")
    assert_ended(processes)


@pytest.mark.parametrize(("trap", "what"), [("OtherTokens", ".*tokens"), ("OtherPositions", "positions")])
def test_a_rank_that_goes_on_from_something_else(trap, what):
    """Until the comparison nothing tells: the tokens are those that the first rank draws."""
    drafter = {"method": f"support.traps:{trap}", "num_speculative_tokens": 2, "adaptive": False}
    llm, processes = start(spawned=False, speculative_config=drafter)
    number = 1 + EVERY
    who = rf"rank 1 \(process {processes[0].pid}\) failed after {number} steps"
    run_into(llm, rf"{who}: DivergedError: in step {number} it had other {what} than rank 0")
    assert_ended(processes)


@pytest.mark.parametrize("sizes", [{}, {"size": 1, "pipeline_parallel_size": 2, "async_scheduling": True}])
def test_ranks_compare_their_steps(monkeypatch, sizes):
    """And agree, whatever the steps are."""
    llm, _ = start(spawned=False, **sizes)
    ranks, told = llm.engine._runner._ranks, []
    send = ranks.send
    monkeypatch.setattr(ranks, "send", lambda message: (told.append(unpack(message).told), send(message))[1])
    params = [greedy(EVERY + 20), greedy(20, n=2), greedy(9, logprobs=2), greedy(9, logits_processors=[favour])]
    outputs = llm.generate([[1, 2, 3] * 5, [4, 5], [6], [7]], params, use_tqdm=False)
    assert token_ids(outputs) == token_ids(tiny_llm().generate([[1, 2, 3] * 5, [4, 5], [6], [7]], params))
    numbers = [sums.number for sums in told if sums is not None]
    assert len(numbers) >= 2 and numbers == [1 + EVERY * i for i in range(len(numbers))]


def favour(past, logits):
    logits[11] += 2.0
    return logits


def test_a_rank_that_does_not_start():
    drafter = {"method": "support.traps:NeverMade", "num_speculative_tokens": 2}
    with pytest.raises(ValueError, match="only the first rank is made"):
        start(speculative_config=drafter)
    assert multiprocessing.active_children() == []


def test_a_rank_that_cannot_be_started_leaves_none(monkeypatch):
    """Python's end waits for those that have begun."""
    start_process = SpawnProcess.start

    def start_or_fail(process):
        if process.name == "tritonllm-rank-2":
            raise OSError(24, "Too many open files")
        start_process(process)

    monkeypatch.setattr(SpawnProcess, "start", start_or_fail)
    before = set(multiprocessing.active_children())
    with pytest.raises(OSError, match="Too many open files"):
        tiny_llm(tensor_parallel_size=2, pipeline_parallel_size=2)
    assert set(multiprocessing.active_children()) <= before


def test_a_step_that_fails_on_the_first_rank(monkeypatch):
    """The others are in the middle of it: the group ends."""
    llm, processes = start(spawned=False)

    def broken(hidden):
        raise KeyError("no such step")

    monkeypatch.setattr(llm.engine._runner._runner._model, "compute_own_logits", broken)
    with pytest.raises(KeyError, match="no such step"):
        llm.generate([[1, 2]], greedy(2), use_tqdm=False)
    assert_ended(processes)
    with pytest.raises(WorkerError, match=r"a step was broken off: KeyError.*make a new engine"):
        llm.generate([[1, 2]], greedy(2), use_tqdm=False)


def test_ctrl_c_leaves_the_ranks_whole(monkeypatch):
    """It waits for the end of the step's launch; the next requests are answered."""
    llm, _ = start(spawned=False)
    expected = llm.generate([[1, 2]], greedy(4), use_tqdm=False)[0].outputs[0].token_ids
    model = llm.engine._runner._runner._model
    logits, left = model.compute_own_logits, [2]

    def interrupted(hidden):
        left[0] -= 1
        if not left[0]:
            os.kill(os.getpid(), signal.SIGINT)
        return logits(hidden)

    monkeypatch.setattr(model, "compute_own_logits", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate([[1, 2]], greedy(20), use_tqdm=False)
    assert llm.generate([[1, 2]], greedy(4), use_tqdm=False)[0].outputs[0].token_ids == expected


def test_ctrl_c_before_a_late_steps_draw_leaves_the_ranks_whole(monkeypatch):
    """The other ranks wait for that step's tokens, which nobody wants any more."""
    llm, _ = start(spawned=False)
    expected = llm.generate([[1, 2]], greedy(4), use_tqdm=False)[0].outputs[0].token_ids
    runner, left, drawn = llm.engine._runner._runner, [3], []
    begin, draw = runner.begin, runner.draw

    def interrupted(step):
        left[0] -= 1
        if not left[0]:
            os.kill(os.getpid(), signal.SIGINT)
        return begin(step)

    monkeypatch.setattr(runner, "begin", interrupted)
    monkeypatch.setattr(runner, "draw", lambda late: (drawn.append(late), draw(late))[1])
    with pytest.raises(KeyboardInterrupt):
        llm.generate([[1, 2]], greedy(20, logits_processors=[lambda output, logits: logits]), use_tqdm=False)
    assert llm.generate([[1, 2]], greedy(4), use_tqdm=False)[0].outputs[0].token_ids == expected
    assert len(drawn) == 3 and drawn[-1] == FREE != drawn[0], "the third was launched, and drawn for the others only"


def test_an_engine_that_is_dropped_ends_its_ranks(monkeypatch):
    monkeypatch.setattr(executor, "FAREWELL", PATIENCE)  # else one that takes long to end is killed
    llm, processes = start()
    llm.generate([[1, 2]], greedy(2), use_tqdm=False)
    del llm
    assert_ended(processes)
    assert [process.exitcode for process in processes] == [0]


SCRIPT = """
import multiprocessing, sys
from tritonllm import LLM, SamplingParams
if __name__ == "__main__":
    llm = LLM(sys.argv[1], tensor_parallel_size=2, num_blocks=64, max_num_seqs=4)
    print(*(process.pid for process in multiprocessing.active_children()), flush=True)
    params = SamplingParams(max_tokens=100000, ignore_eos=True)
    while sys.argv[2] == "run":
        llm.generate([[1, 2, 3]], params, use_tqdm=False)
        print("it runs", flush=True)
    if sys.argv[2] == "wait":
        sys.stdin.read()
"""


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except FileNotFoundError:
        return False


@pytest.mark.parametrize("doing", ["run", "wait", "end"])
def test_no_rank_outlives_the_engine(tmp_path, doing):
    """Killed while it runs or waits, or at its own end."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    command = [sys.executable, str(script), str(tiny_checkpoint()), doing]
    shared = shared_memory()
    process = forked_programs.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment(), text=True
    )
    (pid,) = map(int, process.stdout.readline().split())
    if doing == "end":
        assert process.wait(PATIENCE) == 0
    else:
        assert alive(pid)
        assert doing == "wait" or process.stdout.readline() == "it runs\n"
        process.kill()
    said = process.communicate()[1]
    until = time.monotonic() + PATIENCE
    while alive(pid) and time.monotonic() < until:
        time.sleep(0.05)
    assert not alive(pid)
    assert shared_memory() <= shared
    assert doing != "end" or said == ""


@pytest.mark.parametrize("sizes", ["tensor_parallel_size=2", "pipeline_parallel_size=2"])
def test_a_script_without_a_guard_is_told(tmp_path, sizes):
    """The rank's process imports the script, and would make an engine itself."""
    text = SCRIPT.replace('if __name__ == "__main__":', "if True:").replace("tensor_parallel_size=2", sizes)
    script = tmp_path / "script.py"
    script.write_text(text)
    command = [sys.executable, str(script), str(tiny_checkpoint()), "end"]
    ended = subprocess.run(command, env=environment(), capture_output=True, text=True)
    assert ended.returncode == 1 and not ended.stdout
    last = ended.stderr.splitlines()[-1]
    assert "rank 1" in last and "status 1; a script makes an engine below `if __name__ == '__main__':`" in last
