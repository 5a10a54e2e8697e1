"""The server's engine on two ranks: its tokens, its end, and the end of a rank."""

import asyncio
import os
import signal

import psutil
import pytest
from support.engines import greedy, tiny_checkpoint, tiny_llm
from support.imported_processes import imported_processes
from support.server import eventually

from tritonllm import AsyncEngineArgs, AsyncLLM
from tritonllm.serve.engines.engine_client import EngineDeadError

PROMPT = list(range(5, 25))
ENGINE = {"block_size": 4, "num_gpu_blocks_override": 64, "max_num_seqs": 4, "max_num_batched_tokens": 64}


@pytest.fixture
def llm():
    arguments = AsyncEngineArgs(model=str(tiny_checkpoint()), **ENGINE, tensor_parallel_size=2)
    made = AsyncLLM.from_engine_args(arguments)
    yield made
    made.shutdown()


def rank_of(llm):
    """The process of rank 1, a child of the engine's."""
    children = psutil.Process(llm.engine_pid).children()
    (rank,) = [child for child in children if "spawn_main" in " ".join(child.cmdline())]
    return rank


async def tokens(llm, request_id, most):
    async for output in llm.generate(PROMPT, greedy(most), request_id):
        last = output
    return list(last.outputs[0].token_ids)


def test_tokens_and_the_end(llm):
    expected = tiny_llm().generate([PROMPT], greedy(12), use_tqdm=False)[0].outputs[0].token_ids
    rank = rank_of(llm)
    assert asyncio.run(tokens(llm, "a", 12)) == list(expected)
    llm.shutdown()
    eventually(lambda: not rank.is_running())


def test_stages():
    arguments = AsyncEngineArgs(model=str(tiny_checkpoint()), **ENGINE, pipeline_parallel_size=2, async_scheduling=True)
    with imported_processes():
        staged, alone = AsyncLLM.from_engine_args(arguments), tiny_llm()

    async def several():
        return await asyncio.gather(*(tokens(staged, str(most), most) for most in (12, 5, 9)))

    try:
        found = asyncio.run(several())
    finally:
        staged.shutdown()
    expected = [alone.generate([PROMPT], greedy(most), use_tqdm=False)[0].outputs[0] for most in (12, 5, 9)]
    assert found == [list(output.token_ids) for output in expected]


def test_a_killed_rank_ends_the_engine_and_is_named(llm):
    rank = rank_of(llm)

    async def kill():
        running = asyncio.create_task(tokens(llm, "a", 230))
        await asyncio.sleep(0.05)
        os.kill(rank.pid, signal.SIGKILL)
        with pytest.raises(EngineDeadError, match=rf"status 1: WorkerError: rank 1 \(process {rank.pid}\) failed"):
            while True:
                await running
                running = asyncio.create_task(tokens(llm, "b", 230))

    asyncio.run(kill())
