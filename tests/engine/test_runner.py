import dataclasses
from types import SimpleNamespace
from unittest.mock import patch

import numpy as np
import pytest
import torch
from support.engines import greedy, tiny_checkpoint, tiny_llm
from support.tiny_models import load_decoder

from tritonllm import SamplingParams
from tritonllm.config.engine import EngineConfig
from tritonllm.dist.group import Group
from tritonllm.dist.pipeline import Team
from tritonllm.engine.data.plan import describe
from tritonllm.engine.data.results import StepTimeoutError
from tritonllm.engine.data.step import SharedPrefix
from tritonllm.engine.step import shared_prefix
from tritonllm.engine.step.dummy_step import dummy_step
from tritonllm.engine.step.room_sizes import graph_sizes, padded
from tritonllm.engine.step.runner import ModelRunner
from tritonllm.engine.step.warm_up import warm_up_sizes
from tritonllm.layers import attention
from tritonllm.layers.segments import Segments, decodes
from tritonllm.models.decoder import Decoder

CPU = torch.device("cpu")


def make_runner(**settings):
    folder = tiny_checkpoint()
    config = EngineConfig.from_kwargs(model=str(folder), block_size=4, max_num_seqs=8, **settings)
    return ModelRunner(load_decoder(folder), config, CPU, max_model_len=64)


@pytest.mark.parametrize(("budget", "sizes"), [(1, [1]), (2, [1, 2]), (7, [1, 2, 4, 7]), (8, [1, 2, 4, 8])])
def test_warm_up_sizes(budget, sizes):
    assert warm_up_sizes(budget) == sizes


@pytest.mark.parametrize(("seats", "sizes"), [(1, [1]), (5, [1, 2, 4, 5]), (40, [1, 2, 4, 8, 16, 32, 40])])
def test_graph_sizes_end_with_the_largest_batch(seats, sizes):
    assert graph_sizes(seats) == sizes
    assert [padded(n, sizes) for n in (0, 1, seats)] == [0, 1, seats]
    assert all(padded(n, sizes) == min(size for size in sizes if size >= n) for n in range(1, seats + 1))


@pytest.mark.parametrize("tokens", [1, 5, 64, 100])  # 100: two sequences of at most 64
def test_steps_before_the_first_request_leave_the_cache_alone(monkeypatch, tokens):
    monkeypatch.setattr(shared_prefix, "MIN_SAVED_BYTES", 1)  # so that they include steps with a shared prefix
    runner = make_runner()
    runner.start(num_blocks=3, max_model_len=64)
    with torch.inference_mode():
        for layer in runner.caches.views:
            layer.k.fill_(7.0)
            layer.v.fill_(7.0)
        runner.warm_up().prefill_step(tokens)
        for kind in ({}, {"shared": True}, {"prompt_token": True}):
            runner.warm_up().decode_step(min(tokens, 8), 4, **kind)
    assert all((t == 7.0).all() for layer in runner.caches.views for t in (layer.k, layer.v))


@pytest.mark.parametrize(
    ("settings", "calls"), [({}, 6), ({"disable_cascade_attn": True}, 0), ({"enable_prefix_caching": False}, 0)]
)
def test_steps_before_the_first_request_include_shared_prefixes(monkeypatch, settings, calls):
    """In two widths and three layers; but not where no step can share as much as it takes."""
    monkeypatch.setattr(shared_prefix, "MIN_SAVED_BYTES", 7 * 16 * make_runner().block_bytes // 3)
    runner = make_runner(**settings)
    runner.start(num_blocks=3, max_model_len=64)
    spy = patch.object(attention, "cascade_decode_attention", wraps=attention.cascade_decode_attention)
    with spy as cascade, torch.inference_mode():
        runner.warm_up().run()
    assert cascade.call_count == calls


@pytest.mark.parametrize(("chunks", "captured", "shares"), [([4], 1, False), ([4], None, True), ([], 1, True)])
def test_a_step_with_prompts_shares_nothing_where_it_is_captured(chunks, captured, shares):
    runner = make_runner()
    shared = SharedPrefix(1, np.ones(3, dtype=bool))
    step = dataclasses.replace(dummy_step(3, chunks, rows=3 + len(chunks), width=2), shared=shared)
    runner._graphs = SimpleNamespace(key_for=lambda one: captured if one.shared is None else None)
    with patch.object(runner._builder, "build", return_value=step):
        assert (runner.build(None).shared is shared) == shares


@pytest.mark.parametrize("cache", ["auto", "fp8"])
def test_few_keys_and_many_are_two_regimes(cache):
    """Whatever the cache's dtype: a step is captured once for each."""
    runner = make_runner(kv_cache_dtype=cache)
    with patch.object(runner._model, "short_keys", lambda sequences: 9):
        assert len(runner._regimes.bounds(Segments(decodes(3)))) == 2


def test_block_bytes_and_the_blocks_that_fit():
    runner = make_runner(cpu_cache_bytes=100_000)
    # keys and values, 3 layers, 4 tokens, 2 heads of 16, float32
    assert runner.block_bytes == 2 * 3 * 4 * 2 * 16 * 4
    assert runner.fit_num_blocks() == 100_000 // runner.block_bytes
    assert make_runner(num_blocks=11).fit_num_blocks() == 11


def test_split_keys_leave_room_for_more_tokens():
    """As many blocks fit into a rank's memory; each has its tokens of both ranks, of a draft model of all."""
    room = {}
    for context in (1, 2):
        sizes = {"tensor_parallel_size": 4, "decode_context_parallel_size": context, "num_blocks": None}
        config = EngineConfig.from_kwargs(model="m", block_size=4, cpu_cache_bytes=100_000, **sizes)
        team = Team(Group(0, 4), context=Group(0, context))
        where = {"dtype": torch.float32, "device": torch.device("meta"), "max_model_len": 64}
        model = Decoder(load_decoder(tiny_checkpoint()).spec, **where, group=team.group, context=team.context)
        runner = ModelRunner(model, config, CPU, max_model_len=64, team=team)
        assert runner.block_bytes == 2 * 3 * 4 * 1 * 16 * 4
        room[context] = runner.fit_num_blocks() * config.block_tokens
        assert [cache.k.shape[1] for cache in started(runner).caches.views] == [4, 4, 4]
    assert room[2] == 2 * room[1]


def started(runner):
    runner.start(num_blocks=3, max_model_len=64)
    return runner


class NeverDone:
    def query(self):
        return False


def test_a_step_that_does_not_end_is_named():
    llm = tiny_llm()
    params = SamplingParams(temperature=1.7, min_p=1.0, max_tokens=5)
    for index in range(3):
        llm.engine.add_request(f"r{index}", [1, 2, 3], params)
    plan = llm.engine._scheduler.schedule()
    step = llm.engine._runner.launch(plan)
    step._done = NeverDone()
    words = (
        r"after 0\.1 s.*0 decodes, 0 drafts and 9 prompt tokens of requests 'r0' \(tokens 0 to 3; .*min_p=1\.0.*'r2'"
    )
    with pytest.raises(StepTimeoutError, match=words):
        step.wait(0.1, lambda: describe(plan))


def test_only_some_requests_of_a_large_step_are_named():
    llm = tiny_llm(max_num_seqs=60)
    for index in range(20):
        llm.engine.add_request(f"r{index}", [1], greedy(2))
    message = describe(llm.engine._scheduler.schedule())
    assert message.count("tokens 0 to 1") == 8 and message.endswith("and 12 more")
