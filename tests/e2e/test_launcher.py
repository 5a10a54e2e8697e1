"""Ranks that torchrun has started: one script, one answer, and nobody left when a rank dies or stops."""

import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from support import forked_programs
from support.checkout import environment
from support.engines import greedy, tiny_checkpoint, tiny_llm
from support.server import eventually
from support.streams import all_gone
from support.waiting import PATIENCE

from tritonllm.engine.data.agreement import EVERY

pytestmark = pytest.mark.long

# The launcher ends all ranks as soon as one has died, in the middle of what they write: rank 0 says to the end what
# it has seen, and ends by itself.
SCRIPT = """
import os
import signal
import sys
if os.environ["RANK"] == "0":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
from tritonllm import LLM, SamplingParams
arguments = {"num_blocks": 64, "max_num_seqs": 4, "step_timeout": float(os.environ["STEP_TIMEOUT"])}
if sys.argv[3:] == [os.environ["RANK"]]:
    from support.traps import draw_otherwise
    draw_otherwise()
sizes = {os.environ.get("SIZES", "tensor_parallel_size"): 2}
if "DRAFTS" in os.environ:
    drafts = {"method": "draft_model", "model": os.environ["DRAFTS"], "num_speculative_tokens": 2}
    arguments["speculative_config"] = drafts
llm = LLM(sys.argv[1], **sizes, distributed_executor_backend="external_launcher", **arguments)
params = SamplingParams(temperature=0, max_tokens=int(sys.argv[2]), ignore_eos=True)
while True:
    output = llm.generate([[1, 2, 3]], params, use_tqdm=False)[0]
    print(*output.outputs[0].token_ids, flush=True)
    if sys.argv[2] == "12":
        break
"""


WEIGHTS = """
import sys
from pathlib import Path
from safetensors.torch import load_file
from tritonllm import LLM, SamplingParams
folder, other = map(Path, sys.argv[1:])
how = {"tensor_parallel_size": 2, "distributed_executor_backend": "external_launcher"}
llm = LLM(str(folder), num_blocks=64, max_num_seqs=4, **how)
def answer():
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    print(*llm.generate([[1, 2, 3]], params, use_tqdm=False)[0].outputs[0].token_ids, flush=True)
llm.reload_weights(str(other))
answer()
llm.llm_engine.load_weights(load_file(folder / "model.safetensors").items())
answer()
try:
    llm.apply_model(len)
except ValueError as error:
    print(error)
answer()
"""


def launch(folder, tokens, ranks=2, otherwise=(), step_timeout=PATIENCE, program=SCRIPT):
    """``otherwise``: a rank that goes on from other tokens than the first."""
    script = folder / "script.py"
    script.write_text(program)
    how = ["--nproc-per-node", str(ranks), "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]
    arguments = [script, tiny_checkpoint(), tokens, *otherwise]
    command = [sys.executable, "-m", "torch.distributed.run", *how, *map(str, arguments)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return forked_programs.Popen(command, env=environment(STEP_TIMEOUT=str(step_timeout)), **pipes)


@pytest.mark.parametrize(
    "sizes", [pytest.param("tensor_parallel_size", marks=pytest.mark.smoke), "pipeline_parallel_size"]
)
def test_one_rank_answers(tmp_path, monkeypatch, sizes):
    monkeypatch.setenv("SIZES", sizes)
    expected = tiny_llm().generate([[1, 2, 3]], greedy(12), use_tqdm=False)[0].outputs[0].token_ids
    process = launch(tmp_path, 12)
    out, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, errors
    assert out.split() == [str(token) for token in expected]


def test_other_weights(tmp_path):
    """They travel as data; functions would not."""
    other = Path(shutil.copytree(tiny_checkpoint(), tmp_path / "other"))
    tensors = load_file(other / "model.safetensors")
    save_file({name: tensor.flip(0).contiguous() for name, tensor in tensors.items()}, other / "model.safetensors")
    before, after = (
        " ".join(map(str, tiny_llm(each).generate([[1, 2, 3]], greedy(12), use_tqdm=False)[0].outputs[0].token_ids))
        for each in (None, other)
    )
    process = launch(tmp_path, other, program=WEIGHTS)
    out, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, errors
    first, second, refused, third = out.splitlines()
    assert first == after != before and second == third == before
    assert refused.startswith("collective_rpc: ranks that a launcher or Ray has started take data, and no functions")


@pytest.mark.parametrize(("rank", "number"), [(0, signal.SIGKILL), (1, signal.SIGKILL), (1, signal.SIGSTOP)])
def test_a_rank_that_is_lost_ends_all(tmp_path, rank, number):
    """One that has stopped is missed when a step takes longer than ``step_timeout``."""
    process = launch(tmp_path, 5, step_timeout=5.0 if number == signal.SIGSTOP else PATIENCE)
    assert process.stdout.readline()
    ranks = forked_programs.children(process.pid)
    victim = ranks[rank]
    victim.send_signal(number)
    if number == signal.SIGSTOP:  # for the launcher, which would wait longer to kill it
        others = [child for child in ranks if child != victim]
        goes_on = lambda: (eventually(lambda: all_gone(others)), victim.send_signal(signal.SIGCONT))  # noqa: E731
        threading.Thread(target=goes_on, daemon=True).start()
    try:
        errors = process.communicate(timeout=PATIENCE)[1]
    finally:
        process.kill()
    assert process.returncode != 0
    assert rank == 0 or "WorkerError: a rank of the launcher failed" in errors
    eventually(lambda: all_gone(ranks))


def test_a_rank_that_goes_on_from_other_tokens_ends_all(tmp_path):
    process = launch(tmp_path, 200, otherwise=[1])
    errors = process.communicate(timeout=PATIENCE)[1]
    assert process.returncode != 0
    assert f"DivergedError: in step {1 + EVERY} it had other " in errors and "tokens than rank 0" in errors


def test_a_first_rank_that_fails_alone_while_it_loads_ends_all(tmp_path, monkeypatch):
    """Only the first stage loads the drafts' model. The others do not listen yet, so a farewell would wait for them."""
    drafts = Path(shutil.copytree(tiny_checkpoint(), tmp_path / "drafts"))
    tensors = load_file(drafts / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, drafts / "model.safetensors")
    monkeypatch.setenv("SIZES", "pipeline_parallel_size")
    monkeypatch.setenv("DRAFTS", str(drafts))
    process = launch(tmp_path, 12)
    try:
        errors = process.communicate(timeout=PATIENCE)[1]
    finally:
        process.kill()
    assert process.returncode != 0 and "ValueError: " in errors and "model.norm.weight" in errors, errors


def test_another_number_of_ranks_is_refused(tmp_path):
    process = launch(tmp_path, 12, ranks=1)
    errors = process.communicate(timeout=PATIENCE)[1]
    assert "tensor_parallel_size=2, but the launcher has started 1 processes" in errors


def test_without_a_launcher():
    with pytest.raises(ValueError, match="needs a launcher that sets RANK and WORLD_SIZE: run the script by torchrun"):
        tiny_llm(tensor_parallel_size=2, distributed_executor_backend="external_launcher")
