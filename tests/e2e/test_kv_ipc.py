"""One engine computes prompts, another copies their blocks out of its GPU's memory and goes on with them. Without GPUs
shared memory of the host stands in for theirs (:mod:`support.ipc_memory`)."""

import pytest
from support.engines import greedy, tiny_checkpoint
from support.imported_processes import imported_processes
from support.ipc_memory import Host
from support.ipc_processes import Engine, processes
from support.kv_sharing import FULL, PROMPTS, ROOM, all_slots_are_back, computed_alone, connected_llm, run_prompts
from support.server import eventually
from support.tiny_models import random_tokens
from support.tiny_tokenizer import VOCAB_SIZE
from support.waiting import PATIENCE

from tritonllm.engine.transfer import settings as kv_settings

SETTINGS = {"peers": ["127.0.0.1"], "timeout": PATIENCE, "wait": PATIENCE, "max_bytes": 1 << 20}
TINY = {"block_size": 4, "num_blocks": 64, "max_num_seqs": 8, "max_num_batched_tokens": 64, "kv_offloading_size": ROOM}


@pytest.fixture
def host(monkeypatch):
    host = Host()
    monkeypatch.setattr(kv_settings, "load_cuda", lambda: host.device)
    return host


def wishes(offers, count=16):
    return [greedy(count, extra_args={"kv_transfer_params": offer}) for offer in offers]


def offers_of(producer):
    outputs = producer.generate(PROMPTS, wishes([{"do_remote_decode": True}] * len(PROMPTS), 1), use_tqdm=False)
    return [output.kv_transfer_params for output in outputs]


def test_decode_goes_on_where_prefill_ended(host):
    producer, consumer = (connected_llm("CudaIpc", role, SETTINGS) for role in ("kv_producer", "kv_consumer"))
    assert run_prompts(consumer, wishes(offers_of(producer))) == (computed_alone(), FULL)
    stats = consumer.engine.stats
    assert stats.kv_fetched_blocks == sum(FULL) // 4 and stats.kv_missed_blocks == 0
    assert stats.num_host_blocks and len(host.opened) == 1
    for llm in (producer, consumer):
        llm.engine._transfer.connector.close()
        assert all_slots_are_back(llm)
    assert not host.owned and not host.opened


def test_a_prompts_blocks_come_in_few_copies(host):
    """Both tiers and the memory for others keep them in the prompt's order, also in the place of other blocks."""
    producer, consumer = (connected_llm("CudaIpc", role, SETTINGS) for role in ("kv_producer", "kv_consumer"))
    tier, each = consumer.engine._scheduler.tier, producer.engine._runner.block_bytes
    copied = []  # copies of a load and their bytes; at most 64 tokens of a prompt are computed at once, and saved
    host.before_copy = lambda spans: copied.append((len(spans), sum(nbytes for _, _, nbytes in spans)))
    counts = []
    for seed in range(2 * tier.num_slots // 25):
        prompt = random_tokens(101, VOCAB_SIZE, seed=1000 + seed)
        (first,) = producer.generate([prompt], wishes([{"do_remote_decode": True}], 1), use_tqdm=False)
        copied.clear()
        (output,) = consumer.generate([prompt], wishes([first.kv_transfer_params], 1), use_tqdm=False)
        assert output.num_cached_tokens == 100
        counts += [count for count, nbytes in copied if nbytes == 25 * each]
    assert len(counts) >= 2 * tier.num_slots // 25
    assert counts[0] == 1 and max(counts) < 10  # it would be 25
    for llm in (producer, consumer):
        llm.engine._transfer.connector.close()
        assert all_slots_are_back(llm)


@pytest.mark.parametrize("fault", ["refuse", "break", "closed"])
def test_harm_on_the_way_changes_no_token(host, fault):
    settings = {**SETTINGS, "timeout": 5.0}
    producer, consumer = (connected_llm("CudaIpc", role, settings) for role in ("kv_producer", "kv_consumer"))
    offers = offers_of(producer)
    eventually(lambda: len(producer.engine._transfer.connector.kept) >= sum(FULL) // 4)
    host.fault = fault
    assert run_prompts(consumer, wishes(offers))[0] == computed_alone()
    assert consumer.engine.stats.kv_fetched_blocks == 0
    for llm in (producer, consumer):
        llm.engine._transfer.connector.close()
        assert all_slots_are_back(llm)


def test_little_room_changes_no_token(host):
    """Blocks are given up while they are read, and the tier has room for few."""
    settings = {**SETTINGS, "wait": 0, "max_bytes": 5 * 2048}
    producer, consumer = (connected_llm("CudaIpc", role, settings) for role in ("kv_producer", "kv_both"))
    each = producer.engine._runner.block_bytes
    assert settings["max_bytes"] >= 2 * each
    assert run_prompts(consumer, wishes(offers_of(producer)))[0] == computed_alone()
    assert run_prompts(producer)[0] == computed_alone()
    for llm in (producer, consumer):
        llm.engine._transfer.connector.close()
        assert all_slots_are_back(llm)
    assert not host.owned and not host.opened


def test_two_processes_of_which_one_is_killed():
    """Its memory is closed by the other one, which computes then."""
    checkpoint = {**TINY, "model": str(tiny_checkpoint())}
    with imported_processes(), processes() as made:
        made += [Engine(role, None, checkpoint, SETTINGS) for role in ("kv_producer", "kv_consumer")]
        producer, consumer = made
        offers = producer.prefill(PROMPTS)
        tokens, cached = consumer.decode(PROMPTS, offers, 16)
        assert (tokens, cached) == (computed_alone(), FULL)
        assert consumer.ask("opened") == 1
        producer.kill()
        eventually(lambda: consumer.ask("opened") == 0)
        consumer.ask("reset")
        assert consumer.decode(PROMPTS, offers, 16) == (computed_alone(), [0] * len(PROMPTS))


def test_an_engine_on_the_cpu_is_told_to_take_peer():
    with pytest.raises(ValueError, match=r"kv_connector='CudaIpc' needs a CUDA device.*take 'Peer'"):
        connected_llm("CudaIpc", "kv_both", SETTINGS)
