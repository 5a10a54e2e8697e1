"""One engine computes prompts, another reads their blocks out of its memory and goes on with them."""

from importlib.util import find_spec

import pytest
from support.engines import greedy
from support.kv_sharing import FULL, PROMPTS, all_slots_are_back, computed_alone, connected_llm, run_prompts
from support.nixl_agents import Network
from support.waiting import PATIENCE

from tritonllm.engine.transfer import settings as kv_settings

installed = pytest.mark.skipif(find_spec("nixl") is None, reason="needs the extra nixl")


@pytest.mark.parametrize("library", ["stand-in", pytest.param("nixl", marks=installed)])
def test_decode_goes_on_where_prefill_ended(library, monkeypatch):
    network = Network()
    if library == "stand-in":
        monkeypatch.setattr(kv_settings, "load_nixl", lambda: network.agent)
    settings = {"peers": ["127.0.0.1"], "timeout": PATIENCE, "wait": PATIENCE, "max_bytes": 1 << 24}
    producer, consumer = (connected_llm("Nixl", role, settings) for role in ("kv_producer", "kv_consumer"))
    first = greedy(1, extra_args={"kv_transfer_params": {"do_remote_decode": True}})
    offers = [output.kv_transfer_params for output in producer.generate(PROMPTS, first, use_tqdm=False)]
    wishes = [greedy(16, extra_args={"kv_transfer_params": offer}) for offer in offers]
    assert run_prompts(consumer, wishes) == (computed_alone(), FULL)
    stats = consumer.engine.stats
    assert stats.kv_fetched_blocks == sum(FULL) // 4 and stats.kv_missed_blocks == 0
    for llm in (producer, consumer):
        llm.engine._transfer.connector.close()
        assert all_slots_are_back(llm)
    assert network.living == 0


@pytest.mark.parametrize("fault", ["refuse", "break", "flip", "stall"])
def test_harm_on_the_way_changes_no_token(fault, monkeypatch):
    network = Network()
    monkeypatch.setattr(kv_settings, "load_nixl", lambda: network.agent)
    settings = {"peers": ["127.0.0.1"], "timeout": 1.0, "max_bytes": 1 << 24}
    producer, consumer = (connected_llm("Nixl", role, settings) for role in ("kv_producer", "kv_consumer"))
    producer.generate(PROMPTS, greedy(1), use_tqdm=False)
    network.fault = fault
    offer = producer.engine._transfer.connector.offer()
    wishes = [greedy(16, extra_args={"kv_transfer_params": offer})] * len(PROMPTS)
    assert run_prompts(consumer, wishes)[0] == computed_alone()
    for llm in (producer, consumer):
        llm.engine._transfer.connector.close()
        assert all_slots_are_back(llm)
