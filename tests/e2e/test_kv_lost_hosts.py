"""Prefill and decode on hosts of their own: whatever becomes of the network or of the prefill host, tokens stay what
they are, and blocks come again when they can. Both engines are of this process, and on two hosts nevertheless."""

import time

import pytest
from support.engines import token_ids
from support.kv_sharing import FULL, PROMPTS, computed_alone, decode, peer_engines, prefill, wish
from support.namespaces import network
from support.server import eventually
from support.waiting import PATIENCE

from tritonllm.engine.transfer.peer_client import FRESH

pytestmark = pytest.mark.long

PORT = 9000


@pytest.fixture(scope="module")
def alone() -> list[list[int]]:
    return computed_alone()


@pytest.fixture
def hosts():
    """That of prefill and that of decode."""
    with network(2) as made:
        yield made


@pytest.fixture
def engines():
    with peer_engines() as start:
        yield start


@pytest.fixture
def prefilling(hosts, engines):
    """``prefilling()`` starts an engine at the first host, and tells what it offers and itself."""
    host = hosts.hosts[0]

    def start():
        with host.inside():
            llm = engines("kv_producer", host=host.address, port=PORT)
            return prefill(llm), llm

    return start


@pytest.fixture
def decoding(hosts, engines):
    """``decoding(timeout)`` makes an engine at the second host, where the test goes on."""
    first, second = hosts.hosts
    with second.inside():
        yield lambda timeout: engines("kv_consumer", timeout=timeout, peers=[first.address])


def brings_all_again(llm, offers, alone):
    def works():
        llm.reset_prefix_cache()
        tokens, cached = decode(llm, offers)
        assert tokens == alone
        return cached == FULL

    eventually(works)


def test_a_slow_link_and_then_a_split(hosts, alone, prefilling, decoding):
    first, second = hosts.hosts
    offers, _ = prefilling()
    consumer = decoding(4.0)
    hosts.slow_down(second, kilobits=16)
    tokens, cached = decode(consumer, offers)
    assert tokens == alone and sum(cached) < sum(FULL)
    hosts.speed_up(second)
    hosts.cut(first)
    consumer.reset_prefix_cache()
    assert decode(consumer, offers) == (alone, [0] * len(PROMPTS))
    hosts.mend(first)
    brings_all_again(consumer, offers, alone)


@pytest.mark.smoke
def test_a_split_while_blocks_come(hosts, alone, prefilling, decoding):
    first, second = hosts.hosts
    offers, _ = prefilling()
    consumer = decoding(8.0)
    hosts.slow_down(second, kilobits=64)
    for number, (prompt, offer) in enumerate(zip(PROMPTS, offers, strict=True)):
        consumer.engine.add_request(str(number), {"prompt_token_ids": prompt}, wish(16, **offer))
    ended, is_cut = {}, False
    while consumer.engine.has_unfinished_requests():
        ended |= {output.request_id: output for output in consumer.engine.step() if output.finished}
        if not is_cut and any(fetch.slots for fetch in consumer.engine._transfer._asking):
            hosts.cut(first)
            is_cut = True
    outputs = [ended[str(number)] for number in range(len(PROMPTS))]
    assert token_ids(outputs) == alone
    assert sum(output.num_cached_tokens for output in outputs) < sum(FULL)
    hosts.speed_up(second)
    hosts.mend(first)
    brings_all_again(consumer, offers, alone)
    assert is_cut


def test_the_prefill_host_is_lost_and_replaced(hosts, alone, prefilling, decoding):
    first = hosts.hosts[0]
    offers, lost = prefilling()
    consumer = decoding(8.0)
    assert decode(consumer, offers) == (alone, FULL)
    hosts.cut(first)
    lost.engine._transfer.connector.close()
    consumer.reset_prefix_cache()
    assert decode(consumer, offers) == (alone, [0] * len(PROMPTS))
    offers, _ = prefilling()
    hosts.mend(first)
    brings_all_again(consumer, offers, alone)


def test_the_prefill_host_is_replaced_between_two_requests(hosts, alone, prefilling, decoding):
    """Connections to the lost one look open, and cost nothing."""
    first = hosts.hosts[0]
    offers, lost = prefilling()
    consumer = decoding(PATIENCE)
    assert decode(consumer, offers) == (alone, FULL)
    hosts.cut(first)
    lost.engine._transfer.connector.close()
    offers, _ = prefilling()
    time.sleep(FRESH)
    hosts.mend(first)
    consumer.reset_prefix_cache()
    assert decode(consumer, offers) == (alone, FULL)
