"""One engine computes prompts, another goes on with them: tokens stay what they are, whatever happens on the way."""

import pytest
from support.engines import greedy, similar_checkpoint, tiny_checkpoint, tiny_llm, token_ids
from support.fault_proxy import fault_proxy
from support.kv_sharing import FULL, PROMPTS, computed_alone, decode, peer_engines, prefill, wish
from support.server import eventually
from support.waiting import PATIENCE


@pytest.fixture(scope="module")
def alone() -> list[list[int]]:
    return computed_alone()


@pytest.fixture
def engines():
    """``engines(role)`` makes one; when their connectors are closed, all slots are back and no thread is left."""
    with peer_engines() as start:
        yield start


def test_decode_goes_on_where_prefill_ended(alone, engines):
    producer, consumer = engines("kv_producer"), engines("kv_consumer")
    offers = prefill(producer)
    port = producer.engine._transfer.connector.offer()["remote_port"]
    where = {"remote_host": "127.0.0.1", "remote_port": port}
    assert offers == [{"do_remote_prefill": True, "do_remote_decode": False, **where}] * len(PROMPTS)
    assert decode(consumer, offers) == (alone, FULL)
    stats = consumer.engine.stats
    assert stats.kv_fetched_blocks == sum(FULL) // 4 and stats.kv_missed_blocks == 0
    producer.generate(PROMPTS[:1], greedy(1), use_tqdm=False)
    assert producer.engine.stats.kv_saved_blocks >= sum(FULL) // 4


def test_decode_may_be_asked_while_prefill_still_runs(alone, engines):
    producer, consumer = engines("kv_producer"), engines("kv_consumer", timeout=PATIENCE)
    offer = {**producer.engine._transfer.connector.offer(), "pending": True}
    for number, prompt in enumerate(PROMPTS):
        consumer.engine.add_request(str(number), {"prompt_token_ids": prompt}, wish(16, **offer))
    consumer.engine.step()  # they wait
    producer.generate(PROMPTS, greedy(1), use_tqdm=False)
    ended = {}
    while consumer.engine.has_unfinished_requests():
        ended |= {output.request_id: output for output in consumer.engine.step() if output.finished}
    outputs = [ended[str(number)] for number in range(len(PROMPTS))]
    assert (token_ids(outputs), [output.num_cached_tokens for output in outputs]) == (alone, FULL)


def test_both_ways(alone, engines):
    one, other = engines("kv_both"), engines("kv_both")
    assert decode(other, prefill(one)) == (alone, FULL)
    other.reset_prefix_cache()
    one.reset_prefix_cache()
    assert decode(one, prefill(other))[0] == alone


def test_answers_say_nothing_unless_they_are_asked_and_there_is_something(engines):
    producer, consumer = engines("kv_producer"), engines("kv_consumer")
    for llm, params in (
        (producer, greedy(1)),
        (producer, wish(1, do_remote_decode=False)),
        (consumer, wish(1, do_remote_decode=True)),
        (tiny_llm(), wish(1, do_remote_decode=True)),
    ):
        (output,) = llm.generate(PROMPTS[:1], params, use_tqdm=False)
        assert output.kv_transfer_params is None


def test_who_has_no_connector_says_so_once(caplog):
    llm = tiny_llm()
    place = {"do_remote_prefill": True, "remote_host": "127.0.0.1", "remote_port": 9}
    for _ in range(2):
        llm.generate(PROMPTS[:2], wish(1, **place), use_tqdm=False)
    assert caplog.text.count("name the engine at 127.0.0.1:9, but this engine has no kv_transfer_config") == 1


def test_what_is_no_dictionary_is_refused():
    llm = tiny_llm()
    for extra in ({"kv_transfer_params": 3}, {"kv_transfer_params": {}, "mine": 1}):
        with pytest.raises(ValueError, match=r"kv_transfer_params must be a dict|extra_args are for"):
            llm.generate(PROMPTS[:1], greedy(1, extra_args=extra), use_tqdm=False)


def test_blocks_of_another_size_are_not_found(engines, alone, caplog):
    producer, consumer = engines("kv_producer"), engines("kv_consumer", engine={"block_size": 8}, wait=0)
    assert decode(consumer, prefill(producer)) == (alone, [0] * 6)
    assert consumer.engine.stats.kv_missed_blocks == sum((len(prompt) - 1) // 8 for prompt in PROMPTS)
    port = producer.engine._transfer.connector.offer()["remote_port"]
    assert caplog.text.count(f"the engine at 127.0.0.1:{port} has none of the prompt's blocks: is it of other w") == 1


def test_blocks_of_another_model_are_not_found(engines):
    producer, consumer = engines("kv_producer"), engines("kv_consumer", similar_checkpoint(), wait=0)
    tokens, cached = decode(consumer, prefill(producer))
    assert cached == [0] * 6 and consumer.engine.stats.kv_fetched_blocks == 0
    assert tokens == token_ids(tiny_llm(similar_checkpoint()).generate(PROMPTS, greedy(16), use_tqdm=False))


@pytest.mark.parametrize("kind", ["cut", "stall", "drop", "flip", "double", "refuse"])
@pytest.mark.parametrize("at", [0, 40, 3000])
def test_harm_on_the_way_changes_no_token(alone, engines, kind, at):
    producer, consumer = engines("kv_producer"), engines("kv_consumer", timeout=1.0)
    (offer, *_) = prefill(producer)
    with fault_proxy(offer["remote_port"], kind, at) as proxy:
        assert decode(consumer, [{**offer, "remote_port": proxy.port}] * len(PROMPTS))[0] == alone
        assert proxy.connections
        consumer.engine._transfer.connector.close()
        producer.engine._transfer.connector.close()


def test_a_producer_that_is_gone(alone, engines):
    producer, consumer = engines("kv_producer"), engines("kv_consumer")
    offers = prefill(producer)
    producer.engine._transfer.connector.close()
    assert decode(consumer, offers) == (alone, [0] * len(PROMPTS))


def test_a_producer_with_little_room(alone, engines):
    each = tiny_llm(tiny_checkpoint()).engine._runner.block_bytes
    producer, consumer = engines("kv_producer", max_bytes=4 * each), engines("kv_consumer", wait=0.01)
    offers = prefill(producer)
    connector = producer.engine._transfer.connector
    eventually(lambda: connector.kept.num_bytes == 4 * each)
    tokens, cached = decode(consumer, offers)
    assert tokens == alone and sum(cached) <= 16
