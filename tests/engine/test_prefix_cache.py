import itertools
from array import array

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from support.examples import examples

from tritonllm.config.sampling_params import SamplingParams
from tritonllm.engine.data.request import PACKED, Request
from tritonllm.engine.schedule import prefix_cache
from tritonllm.engine.schedule.block_pool import BlockPool
from tritonllm.engine.schedule.prefix_cache import PrefixCache

NAMES = map(str, itertools.count())
TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=14)  # two tokens: prefixes collide all the time
SALTS = st.sampled_from([None, "", "a"])


def make(tokens, salt=None, **params):
    return Request(next(NAMES), tokens, SamplingParams(**params), max_total_tokens=1000, cache_salt=salt)


def compute(cache, request, upto):
    """What the scheduler and a step do: take the matched blocks and new ones, compute, insert."""
    blocks = cache.match(request)
    cache.pool.retain(blocks)
    request.block_ids = blocks + cache.pool.allocate_many(-(-upto // cache.block_tokens) - len(blocks))
    request.num_labelled_blocks = len(blocks)
    request.num_computed_tokens = upto
    cache.insert(request)


class CacheMachine(RuleBasedStateMachine):
    """The cache against a dict from (salt, prefix) to block, without hashes or chains."""

    @initialize(block_size=st.integers(1, 4), num_blocks=st.integers(4, 12))
    def start(self, block_size, num_blocks):
        self.size = block_size
        self.pool = BlockPool(num_blocks)
        self.cache = PrefixCache(block_size, self.pool)
        self.block_of = {}
        self.running = []  # [request, tokens computed]

    def key(self, request, index):
        return request.cache_salt, tuple(request.token_ids(0, (index + 1) * self.size))

    def forget(self, blocks):
        self.block_of = {key: block for key, block in self.block_of.items() if block not in blocks}

    def insert(self, request, start, end):
        request.num_computed_tokens = end
        self.cache.insert(request)
        for index in range(len(request.block_ids)):
            if start < (index + 1) * self.size <= end:
                self.block_of.setdefault(self.key(request, index), request.block_ids[index])

    def matches(self, request):
        expected = []
        for index in range(len(request.prompt_token_ids)):
            is_full = (index + 1) * self.size < request.num_tokens  # strictly: one token is left to compute
            if not is_full or self.key(request, index) not in self.block_of:
                break
            expected.append(self.block_of[self.key(request, index)])
        return expected

    @rule(tokens=TOKENS, salt=SALTS)
    def admit(self, tokens, salt):
        request = make(tokens, salt)
        blocks = self.cache.match(request)
        assert blocks == self.matches(request)
        needed = -(-len(tokens) // self.size) - len(blocks)
        if needed + sum(self.pool.ref_count(block) == 0 for block in blocks) > self.pool.num_free:
            return
        self.pool.retain(blocks)
        new = self.pool.allocate_many(needed)
        self.forget(new)
        request.block_ids = blocks + new
        request.num_labelled_blocks = len(blocks)
        self.running.append([request, len(blocks) * self.size])

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def compute(self, data):
        entry = data.draw(st.sampled_from(self.running))
        request, start = entry
        end = data.draw(st.integers(start, request.num_tokens))
        self.insert(request, start, end)
        entry[1] = end

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def end(self, data):
        entry = data.draw(st.sampled_from(self.running))
        self.running.remove(entry)
        self.pool.release(reversed(entry[0].block_ids))

    @rule()
    def reset(self):
        if self.pool.num_free < self.pool.num_blocks:
            with pytest.raises(RuntimeError, match="in use"):
                self.cache.reset()
        else:
            self.cache.reset()
            self.block_of.clear()

    @invariant()
    def running_requests_own_their_blocks(self):
        for request, _ in self.running:
            assert all(self.pool.ref_count(block) > 0 for block in request.block_ids)


TestCacheMachine = CacheMachine.TestCase
TestCacheMachine.settings = settings(max_examples=examples(100))


@pytest.fixture
def cache():
    return PrefixCache(4, BlockPool(16))


def test_matches_full_blocks_of_the_longest_prefix(cache):
    first = make(range(10))
    compute(cache, first, 10)
    assert cache.match(make([*range(8), 99, 99])) == first.block_ids[:2]
    assert cache.match(make([*range(7), 99, 99])) == first.block_ids[:1]
    assert cache.match(make(range(1, 10))) == []
    assert cache.match(make([*range(10), 99, 99, 99])) == first.block_ids[:2]  # the third block never filled


def test_never_matches_the_whole_prompt(cache):
    first = make(range(8))
    compute(cache, first, 8)
    assert cache.match(make(range(8))) == first.block_ids[:1]
    assert cache.match(make(range(9))) == first.block_ids[:2]


def test_a_block_counts_with_all_that_is_before_it(cache):
    compute(cache, make([1] * 4 + [2] * 4), 8)
    assert cache.match(make([3] * 4 + [2] * 4 + [0])) == []
    assert cache.match(make([2] * 4 + [0])) == []


def test_salts_share_nothing(cache):
    compute(cache, make(range(9), salt="a"), 9)
    for salt, hits in (("a", 2), ("b", 0), ("", 0), (None, 0)):
        assert len(cache.match(make(range(9), salt=salt))) == hits


def test_a_salt_made_of_a_block_is_not_that_block(cache):
    """Else a chosen salt would reach the blocks that follow a known prompt."""
    compute(cache, make([1, 2, 3, 4, 5, 6, 7, 8]), 8)
    salt = b"".join(token.to_bytes(8, "little") for token in (1, 2, 3, 4)).decode()
    assert cache.match(make([5, 6, 7, 8, 9], salt=salt)) == []


def test_prompt_logprobs_fill_the_cache_but_do_not_read_it(cache):
    first = make(range(9), prompt_logprobs=0)
    compute(cache, first, 9)
    assert cache.match(make(range(9), prompt_logprobs=0)) == []
    assert cache.match(make(range(9))) == first.block_ids[:2]


def test_output_tokens_are_cached_too(cache):
    first = make(range(3))
    first.output_token_ids += [3, 4, 5]
    compute(cache, first, 6)
    assert cache.match(make(range(6))) == first.block_ids[:1]


def test_each_block_is_hashed_once(cache, monkeypatch):
    hashed = []
    real = prefix_cache.xxh3_128_digest
    monkeypatch.setattr(prefix_cache, "xxh3_128_digest", lambda data, **k: hashed.append(data) or real(data, **k))
    request = make(range(16))
    for _ in range(3):
        cache.match(request)
    assert len(hashed) == 3  # not the last block, whose last token must run through the model
    request.block_ids = cache.pool.allocate_many(4)
    for start in range(16):
        request.num_computed_tokens = start + 1
        cache.insert(request)
    cache.match(request)
    assert len(hashed) == 4


def test_packed_prompts_have_the_same_digests(cache):
    first, second = make(range(10)), make(range(10))
    second.packed_prompt = array(PACKED, second.prompt_token_ids)
    for request in (first, second):
        request.output_token_ids += [10, 11, 12, 13]
    assert cache.labels(first) == cache.labels(second)
    assert len({*cache.labels(first)}) == 3


def test_blocks_with_tokens_that_are_not_known_yet_are_not_available(cache):
    request = make(range(7))
    request.block_ids = cache.pool.allocate_many(2)
    request.num_computed_tokens = 8  # the last of them is in flight
    cache.insert(request)
    assert cache.match(make(range(9))) == request.block_ids[:1]
    request.output_token_ids.append(7)
    cache.insert(request)
    assert cache.match(make(range(9))) == request.block_ids


def test_statistics(cache):
    for request, cached in ((make(range(9)), 0), (make(range(9)), 8), (make(range(9), prompt_logprobs=1), 0)):
        request.num_cached_tokens = cached
        cache.count(request)
    assert (cache.queries, cache.hits) == (18, 8)


def test_reset_forgets(cache):
    request = make(range(9))
    compute(cache, request, 9)
    with pytest.raises(RuntimeError, match="3 blocks are in use"):
        cache.reset()
    cache.pool.release(request.block_ids)
    assert len(cache.match(make(range(9)))) == 2
    cache.reset()
    assert cache.match(make(range(9))) == []
