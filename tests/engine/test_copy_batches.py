from tritonllm.engine.data.copy_batches import UnderWay


def test_what_a_block_waits_for():
    batches = UnderWay()
    assert batches.last_of([1, 2]) == batches.last_load([1]) == 0
    batches.store(1, 1)
    batches.load(2, 1)
    batches.issue(1, [(1, 7)], [(8, 2)])
    batches.store(2, 2)  # what came is copied away again
    batches.issue(2, [(2, 9)], [])
    assert [batches.last_of([block]) for block in (1, 2, 3)] == [1, 2, 0] and batches.last_of([1, 2, 3]) == 2
    assert [batches.last_load([block]) for block in (1, 2, 3)] == [0, 1, 0] and batches.last_load([]) == 0
    assert batches.slots() == {7, 8, 9}


def test_batches_that_have_ended_are_waited_for_no_more():
    batches = UnderWay()
    for number, block in ((1, 1), (2, 2), (3, 1)):  # block 1 is copied twice
        batches.store(block, number)
        batches.issue(number, [(block, 10 + number)], [])
    batches.end(0)
    assert batches.last_of([2]) == 2
    batches.end(2)
    assert batches.last_of([2]) == 0 and batches.last_of([1]) == 3 and batches.slots() == {13}
    batches.end(5)
    assert batches.last_of([1, 2]) == 0 and not batches.slots()


def test_what_is_being_put_together_counts_for_its_blocks_only():
    batches = UnderWay()
    batches.load(4, 1)
    batches.end(0)
    assert batches.last_load([4]) == 1 and not batches.slots()
