"""Two GPUs give the tokens of one, in captured steps whose collectives are NCCL's, and fail as they should."""

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time

import pytest
import torch
from support.checkout import environment
from support.engines import NGRAMS, greedy, token_ids
from support.gpu_engines import KINDS, PROMPTS, make
from support.mechanism_configs import MECHANISMS
from support.real_configs import QWEN3_0_6B

from tritonllm import SamplingParams
from tritonllm.dist.watch import WorkerError
from tritonllm.experts.rebalance import rebalance

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("qwen3")
    (folder / "config.json").write_text(json.dumps(QWEN3_0_6B))
    return str(folder)


@pytest.fixture(scope="module")
def expected(folder):
    return token_ids(make(folder).generate(PROMPTS, KINDS * 2, use_tqdm=False))


@pytest.mark.parametrize(
    "options",
    [{}, {"enforce_eager": True}, {"speculative_config": NGRAMS}, {"num_blocks": 130}, {"async_scheduling": False}],
)
def test_tokens_are_those_of_one_gpu(folder, expected, options):
    llm = make(folder, tensor_parallel_size=2, **options)
    for _ in range(2):  # the second time from the prefix cache
        assert token_ids(llm.generate(PROMPTS, KINDS * 2, use_tqdm=False)) == expected
    stats = llm.engine.stats
    assert stats.compilations_after_ready == 0
    assert stats.num_free_blocks == stats.num_blocks
    assert (llm.engine._runner._runner.num_graphs > 0) == ("enforce_eager" not in options)


@pytest.mark.parametrize("options", [{}, {"enforce_eager": True}, {"num_blocks": 130}])
def test_ranks_draw_from_their_own_logits(folder, options):
    """Steps whose rows want no more than a temperature and limits, alone and between others. (Weights are random, so
    distributions are flat: top_p and min_p are searched, top_k is settled by its candidates.)"""
    free = [SamplingParams(temperature=t, seed=i, max_tokens=40, ignore_eos=True) for i, t in enumerate((0, 0.6, 1, 2))]
    limits = [{"top_k": 20}, {"top_p": 0.8}, {"top_k": 50, "top_p": 0.7}, {"min_p": 0.3}]
    limited = [SamplingParams(seed=9, max_tokens=40, ignore_eos=True, **limit) for limit in limits]
    one, two = make(folder), make(folder, tensor_parallel_size=2, **options)
    assert two.engine._runner._runner._drawing.finds_limits
    for wishes in (free * 2, limited * 2, [*free, *limited], [*free, *KINDS]):
        expected = token_ids(one.generate(PROMPTS, wishes, use_tqdm=False))
        assert token_ids(two.generate(PROMPTS, wishes, use_tqdm=False)) == expected
    assert two.engine.stats.compilations_after_ready == 0


@pytest.mark.parametrize(
    "options",
    [{}, {"enforce_eager": True}, {"speculative_config": NGRAMS}, {"num_blocks": 130}, {"async_scheduling": False}],
)
def test_stages_give_the_tokens_of_one_gpu(folder, expected, options):
    llm = make(folder, pipeline_parallel_size=2, **options)
    for _ in range(2):
        assert token_ids(llm.generate(PROMPTS, KINDS * 2, use_tqdm=False)) == expected
    stats = llm.engine.stats
    assert stats.compilations_after_ready == 0
    assert stats.num_free_blocks == stats.num_blocks
    assert (llm.engine._runner._runner.num_graphs > 0) == ("enforce_eager" not in options)


@pytest.fixture(scope="module")
def one_key_head(tmp_path_factory):
    """A folder, and the tokens of one GPU."""
    folder = tmp_path_factory.mktemp("one-key-head")
    (folder / "config.json").write_text(json.dumps(QWEN3_0_6B | {"num_key_value_heads": 1}))
    return str(folder), token_ids(make(str(folder)).generate(PROMPTS, KINDS * 2, use_tqdm=False))


@pytest.mark.parametrize(
    "options",
    [{}, {"enforce_eager": True}, {"speculative_config": NGRAMS}, {"num_blocks": 65}, {"async_scheduling": False}],
)
def test_split_keys_give_the_tokens_of_one_gpu(one_key_head, options):
    folder, expected = one_key_head
    llm = make(folder, tensor_parallel_size=2, decode_context_parallel_size=2, **options)
    for _ in range(2):  # the second time from the prefix cache
        assert token_ids(llm.generate(PROMPTS, KINDS * 2, use_tqdm=False)) == expected
    stats = llm.engine.stats
    assert stats.compilations_after_ready == 0
    assert stats.num_free_blocks == stats.num_blocks
    assert (llm.engine._runner._runner.num_graphs > 0) == ("enforce_eager" not in options)


def test_whole_experts(tmp_path):
    """Two layers of Qwen3-30B-A3B's shape: 64 of its 128 experts on each GPU."""
    (tmp_path / "config.json").write_text(json.dumps(MECHANISMS["qwen3-30b-a3b (128 experts, q/k norm)"]))
    alone = token_ids(make(str(tmp_path)).generate(PROMPTS, KINDS * 2, use_tqdm=False))
    llm = make(str(tmp_path), tensor_parallel_size=2, enable_expert_parallel=True)
    assert token_ids(llm.generate(PROMPTS, KINDS * 2, use_tqdm=False)) == alone
    assert llm.engine.stats.compilations_after_ready == 0


def test_placed_experts(tmp_path):
    """By their load, with copies of eight of them."""
    (tmp_path / "config.json").write_text(json.dumps(MECHANISMS["qwen3-30b-a3b (128 experts, q/k norm)"]))
    alone = make(str(tmp_path), count_expert_load=True)
    expected = token_ids(alone.generate(PROMPTS, KINDS * 2, use_tqdm=False))
    path = str(tmp_path / "placement.json")
    rebalance(alone.expert_load(), 2, 8).save(path)
    whole = {"tensor_parallel_size": 2, "enable_expert_parallel": True, "expert_placement": path}
    llm = make(str(tmp_path), **whole, count_expert_load=True)
    assert token_ids(llm.generate(PROMPTS, KINDS * 2, use_tqdm=False)) == expected
    assert llm.engine.stats.compilations_after_ready == 0


@pytest.mark.parametrize(("number", "reason"), [(signal.SIGKILL, "signal 9"), (signal.SIGSTOP, "silent")])
def test_a_lost_rank_ends_the_requests(folder, number, reason):
    """A collective in a graph waits on the GPU for ever, and rank 0 does not."""
    before = set(multiprocessing.active_children())
    llm = make(folder, tensor_parallel_size=2, worker_timeout=2.0)
    (victim,) = set(multiprocessing.active_children()) - before
    threading.Timer(0.5, os.kill, (victim.pid, number)).start()
    begin = time.monotonic()
    with pytest.raises(WorkerError, match=rf"rank 1 .*{reason}"):
        while True:
            llm.generate(PROMPTS, greedy(200), use_tqdm=False)
    assert time.monotonic() - begin < 60.0
    victim.join(10.0)
    assert victim.exitcode is not None


def test_ranks_of_a_launcher_end_with_status_0_after_captured_collectives(tmp_path):
    """NCCL's: a group is not left while a graph with one of them is there, and Python's end cannot wait for that."""
    wait = ["--distributed-executor-backend", "external_launcher", "--disable-custom-all-reduce"]
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "tritonllm", "generate"]
    command += ["-tp", "2", *wait, "--temperature", "0", "--max-tokens", "16", "--prompt", "What is 20 + 22?"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment(), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "42" in done.stdout
