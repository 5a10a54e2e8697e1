import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from support.examples import examples

from tritonllm.engine.schedule.block_pool import BlockPool

LABELS = st.sampled_from([b"a", b"b", b"c", b"d"])


class PoolMachine(RuleBasedStateMachine):
    """The pool against a model in plain lists, which predicts every block that is handed out."""

    @initialize(num_blocks=st.integers(1, 6))
    def start(self, num_blocks):
        self.pool = BlockPool(num_blocks)
        self.free = list(range(num_blocks))  # next to be handed out first
        self.users = [0] * num_blocks
        self.labels = {}

    def used(self):
        return [block for block, users in enumerate(self.users) if users]

    @rule(count=st.integers(0, 7))
    def allocate(self, count):
        if count > len(self.free):
            with pytest.raises(RuntimeError, match="free"):
                self.pool.allocate_many(count)
            return
        expected, self.free = self.free[:count], self.free[count:]
        assert self.pool.allocate_many(count) == expected
        for block in expected:
            self.users[block] = 1
            self.labels.pop(block, None)

    @rule(data=st.data())
    def retain(self, data):
        block = data.draw(st.integers(0, len(self.users) - 1))
        if block in self.free and block not in self.labels:
            with pytest.raises(RuntimeError, match="nothing to keep"):
                self.pool.retain([block])
            return
        self.pool.retain([block])
        if block in self.free:
            self.free.remove(block)
        self.users[block] += 1

    @precondition(lambda self: self.used())
    @rule(data=st.data())
    def release(self, data):
        blocks = data.draw(st.lists(st.sampled_from(self.used()), unique=True))
        self.pool.release(blocks)
        for block in blocks:
            self.users[block] -= 1
            if not self.users[block]:
                self.free.insert(len(self.free) if block in self.labels else 0, block)

    @rule(data=st.data())
    def release_too_often(self, data):
        block = data.draw(st.integers(0, len(self.users) - 1))
        if not self.users[block]:
            with pytest.raises(RuntimeError, match="more often"):
                self.pool.release([block])

    @precondition(lambda self: self.used())
    @rule(data=st.data(), label=LABELS)
    def label(self, data, label):
        block = data.draw(st.sampled_from(self.used()))
        if block in self.labels:
            with pytest.raises(RuntimeError, match="labelled already"):
                self.pool.label(block, label)
            return
        self.pool.label(block, label)
        if label not in self.labels.values():
            self.labels[block] = label

    @rule()
    def clear_labels(self):
        self.pool.clear_labels()
        self.labels.clear()

    @invariant()
    def agrees(self):
        assert self.pool.num_free == len(self.free)
        assert [self.pool.ref_count(block) for block in range(self.pool.num_blocks)] == self.users
        assert len(self.free) + len(self.used()) == self.pool.num_blocks
        where = {label: block for block, label in self.labels.items()}
        for label in (b"a", b"b", b"c", b"d"):
            assert self.pool.find(label) == where.get(label)

    def teardown(self):
        """Whatever happened, the free list holds precisely the free blocks, in the expected order."""
        if hasattr(self, "pool"):
            assert self.pool.allocate_many(len(self.free)) == self.free


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=examples(100))


@pytest.mark.parametrize("num_blocks", [0, -1])
def test_bad_num_blocks(num_blocks):
    with pytest.raises(ValueError, match="num_blocks must be at least 1"):
        BlockPool(num_blocks)


def test_labelled_blocks_outlive_unlabelled_ones_and_go_in_order_of_release():
    pool = BlockPool(4)
    blocks = pool.allocate_many(4)
    for block in blocks[:3]:
        pool.label(block, b"label %d" % block)
    pool.release([2, 0, 3, 1])
    assert [pool.allocate() for _ in range(4)] == [3, 2, 0, 1]


def test_a_label_lasts_until_its_block_is_reused():
    pool = BlockPool(2)
    block = pool.allocate()
    pool.label(block, b"x")
    pool.release([block])
    assert pool.find(b"x") == block
    pool.retain([block])
    assert (pool.ref_count(block), pool.num_free) == (1, 1)
    pool.release([block])
    pool.allocate_many(2)
    assert pool.find(b"x") is None
