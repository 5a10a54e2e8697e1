"""What a picture says of an engine that stands still between two steps."""

from support.engines import greedy, tiny_llm

from tritonllm.engine.picture import CACHED, FREE, SHARED, take_picture

SHARED_PREFIX = list(range(5, 17))  # three blocks


def engine(**more):
    return tiny_llm(block_size=4, num_blocks=32, max_num_seqs=2, **more).engine


def test_an_idle_engine_holds_nothing():
    picture = engine().picture()
    assert picture.running == () and picture.waiting == 0
    assert picture.owners == (FREE,) * 32 and picture.stride == 1
    assert (picture.num_blocks, picture.num_free_blocks, picture.block_size) == (32, 32, 4)


def test_owners_are_those_who_hold_the_blocks():
    running = engine(async_scheduling=False)
    for name in "abc":  # the third one waits
        running.add_request(name, {"prompt_token_ids": [*SHARED_PREFIX, ord(name)]}, greedy(20))
        running.step()
    picture = running.picture()
    first, second = picture.running
    assert picture.waiting == 1
    assert (first.prompt_tokens, second.prompt_tokens) == (13, 13)
    assert (first.output_tokens, second.output_tokens) == (3, 2)
    assert (first.cached_tokens, second.cached_tokens) == (0, 12)
    assert first.computed_tokens == 15 and second.computed_tokens == 14
    requests = {request.seat: request for request in running._scheduler.running}
    shared = set(requests[first.seat].block_ids) & set(requests[second.seat].block_ids)
    assert len(shared) == 3 and {picture.owners[block] for block in shared} == {SHARED}
    for sequence in (first, second):
        own = set(requests[sequence.seat].block_ids) - shared
        assert {block for block, owner in enumerate(picture.owners) if owner == sequence.seat} == own
        assert sequence.blocks == len(own) + 3
    while running.has_unfinished_requests():
        running.step()
    after = running.picture()
    assert after.running == () and after.num_free_blocks == 32
    assert set(after.owners) == {FREE, CACHED}


def test_a_large_pool_is_sampled():
    running = engine(async_scheduling=False)
    running.add_request("a", {"prompt_token_ids": list(range(5, 50))}, greedy(4))
    running.step()
    whole, part = take_picture(running._scheduler), take_picture(running._scheduler, most_blocks=10)
    assert part.stride == 4 and part.owners == whole.owners[::4]
    assert len(part.owners) == 8 and part.running == whole.running
