"""Who uses which block of the KV cache: reference counts and a free list in least-recently-used order. No torch.

Freeing a block does not erase it. A block that carries a label (the digest of its contents) can be found by it, and
taken back from the free list, until :meth:`BlockPool.allocate` hands it out for something else. So every block that
nobody uses is a cache entry and free memory at the same time, and eviction costs nothing until memory is needed.
"""

from collections.abc import Iterable


class BlockPool:
    """``num_blocks`` blocks, all free and unlabelled at first. Each operation takes O(1) time per block.

    The free list is a doubly linked ring threaded through two arrays: ``num_blocks`` itself is the sentinel, its
    successor the block to hand out next, its predecessor the one released last.

    Args:
        num_blocks: blocks in the cache, at least 1.

    Attributes:
        evictions: labelled blocks that were handed out for something else, since the start.
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ValueError(f"num_blocks must be at least 1, got {num_blocks}")
        self.num_blocks = num_blocks
        self.evictions = 0
        self._num_free = num_blocks
        self._refs = [0] * num_blocks
        self._labels: list[bytes | None] = [None] * num_blocks
        self._block_of: dict[bytes, int] = {}
        self._next = [*range(1, num_blocks + 1), 0]
        self._prev = [num_blocks, *range(num_blocks)]

    @property
    def num_free(self) -> int:
        """Blocks without a user, labelled ones included."""
        return self._num_free

    @property
    def num_labelled(self) -> int:
        """Blocks whose contents can be found, in use or free."""
        return len(self._block_of)

    def ref_count(self, block: int) -> int:
        return self._refs[block]

    def count_used(self, blocks: Iterable[int]) -> int:
        """How many of them have a user."""
        refs = self._refs
        return sum(1 for block in blocks if refs[block])

    def keeps(self, block: int) -> bool:
        """Nobody uses it, and its contents can be found."""
        return not self._refs[block] and self._labels[block] is not None

    def kept(self) -> list[int]:
        """All blocks that :meth:`keeps`."""
        return [block for block in self._block_of.values() if not self._refs[block]]

    def allocate(self) -> int:
        """Take the least recently used free block; its label and contents are lost.

        Raises:
            RuntimeError: no block is free; callers look at ``num_free`` first.
        """
        return self.allocate_many(1)[0]

    def allocate_many(self, count: int) -> list[int]:
        """Take ``count`` blocks, or raise and take none. See :meth:`allocate`."""
        if count > self._num_free:
            raise RuntimeError(f"{count} blocks wanted, {self._num_free} of {self.num_blocks} free")
        blocks = []
        for _ in range(count):
            block = self._next[self.num_blocks]
            self._unlink(block)
            self._refs[block] = 1
            label = self._labels[block]
            if label is not None:
                del self._block_of[label]
                self._labels[block] = None
                self.evictions += 1
            blocks.append(block)
        return blocks

    def retain(self, blocks: Iterable[int]) -> None:
        """Add a user to each block; they have some, or are free but labelled."""
        for block in blocks:
            if self._refs[block] == 0:
                if self._labels[block] is None:
                    raise RuntimeError(f"block {block} is free and holds nothing to keep")
                self._unlink(block)
            self._refs[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        """Take one user from each block, in the order given; a block without users becomes free.

        Labelled blocks join the end of the free list, so those released first are evicted first. The others hold
        nothing that could be found again and join its front.
        """
        for block in blocks:
            if self._refs[block] == 0:
                raise RuntimeError(f"block {block} was released more often than it was taken")
            self._refs[block] -= 1
            if self._refs[block] == 0:
                last = self._prev[self.num_blocks] if self._labels[block] is not None else self.num_blocks
                self._link_after(last, block)

    def label(self, block: int, label: bytes) -> None:
        """Let ``find(label)`` return this block, which is in use and unlabelled. A label that is taken stays where
        it is: of several blocks with the same contents, the first one serves later requests."""
        if self._refs[block] == 0 or self._labels[block] is not None:
            raise RuntimeError(f"block {block} is free or labelled already")
        if self._block_of.setdefault(label, block) == block:
            self._labels[block] = label

    def find(self, label: bytes) -> int | None:
        """The block that carries this label, in use or free."""
        return self._block_of.get(label)

    def find_leading(self, labels: Iterable[bytes]) -> list[int]:
        """The blocks that carry these labels, up to the first that no block carries."""
        blocks = []
        for label in labels:
            block = self._block_of.get(label)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def clear_labels(self) -> None:
        for block in self._block_of.values():
            self._labels[block] = None
        self._block_of.clear()

    def _unlink(self, block: int) -> None:
        before, after = self._prev[block], self._next[block]
        self._next[before], self._prev[after] = after, before
        self._num_free -= 1

    def _link_after(self, before: int, block: int) -> None:
        after = self._next[before]
        self._next[before] = self._prev[after] = block
        self._prev[block], self._next[block] = before, after
        self._num_free += 1
