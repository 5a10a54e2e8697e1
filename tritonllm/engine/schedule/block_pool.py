"""Who uses which block of the KV cache: reference counts, and the free blocks in the order in which they are taken. No
torch.

Freeing a block does not erase it. A block that carries a label (the digest of its contents) can be found by it, and
taken back from the free ones, until :meth:`BlockPool.allocate` hands it out for something else. So every block that
nobody uses is a cache entry and free memory at the same time, and eviction costs nothing until memory is needed.
"""

from collections import OrderedDict
from collections.abc import Iterable


class BlockPool:
    """``num_blocks`` blocks, all free and unlabelled at first. Each operation takes O(1) time per block.

    Free blocks without a label are a stack, and are handed out first. Those with one are behind them, in the order in
    which they were released.

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
        self._refs = [0] * num_blocks
        self._labels: list[bytes | None] = [None] * num_blocks
        self._block_of: dict[bytes, int] = {}
        self._blank = [*reversed(range(num_blocks))]  # free, without a label
        self._kept: OrderedDict[int, None] = OrderedDict()  # free, with one

    @property
    def num_free(self) -> int:
        """Blocks without a user, labelled ones included."""
        return len(self._blank) + len(self._kept)

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
        """Whether nobody uses the block, and its contents can be found."""
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
        if count > self.num_free:
            raise RuntimeError(f"{count} blocks wanted, {self.num_free} of {self.num_blocks} free")
        refs, labels, kept = self._refs, self._labels, self._kept
        blank = min(count, len(self._blank))
        blocks = self._blank[len(self._blank) - blank :]
        blocks.reverse()
        del self._blank[len(self._blank) - blank :]
        for _ in range(count - blank):
            block, _ = kept.popitem(last=False)
            label = labels[block]
            assert label is not None  # these have one
            del self._block_of[label]
            labels[block] = None
            blocks.append(block)
        self.evictions += count - blank
        for block in blocks:
            refs[block] = 1
        return blocks

    def retain(self, blocks: Iterable[int]) -> None:
        """Add a user to each block; they have some, or are free but labelled."""
        refs, kept = self._refs, self._kept
        for block in blocks:
            count = refs[block]
            if count == 0:
                if block not in kept:
                    raise RuntimeError(f"block {block} is free and holds nothing to keep")
                del kept[block]
            refs[block] = count + 1

    def release(self, blocks: Iterable[int]) -> None:
        """Take one user from each block, in the order given; a block without users becomes free.

        Of labelled blocks those released first are evicted first. The others hold nothing that could be found again:
        what is released last is handed out next.
        """
        refs, labels, blank, kept = self._refs, self._labels, self._blank, self._kept
        for block in blocks:
            count = refs[block] - 1
            if count > 0:
                refs[block] = count
            elif count < 0:
                raise RuntimeError(f"block {block} was released more often than it was taken")
            else:
                refs[block] = 0
                if labels[block] is None:
                    blank.append(block)
                else:
                    kept[block] = None

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
        for block in map(self._block_of.get, labels):
            if block is None:
                break
            blocks.append(block)
        return blocks

    def clear_labels(self) -> None:
        for block in self._block_of.values():
            self._labels[block] = None
        self._block_of.clear()
        self._blank[:0] = reversed(self._kept)  # they stay behind those that had none
        self._kept.clear()
