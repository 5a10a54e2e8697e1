"""Lesson 2: where a token lies, and who may write into a block.

The exercise: replace each `hole` by your code. `tritonllm tutorial check 2` checks it.
"""


def slot_of(position: int, block_table: list[int], block_size: int) -> int:
    """The slot of the pool in which token ``position`` lies; block b has the slots from ``b * block_size`` on."""
    # exercise: return hole("the slot: find the block in the table first, then the place in it")
    block = block_table[position // block_size]
    return block * block_size + position % block_size
    # until here


def make_room(
    position: int, block_table: list[int], block_size: int, users: dict[int, int], free: list[int]
) -> list[tuple[int, int]]:
    """Let a sequence write token ``position``: afterwards its block is in the table, and nobody else uses it.

    Args:
        position: the position of the next token; those before it are in the cache already.
        block_table: the sequence's block table; is changed.
        users: block -> how many tables name it; is changed.
        free: blocks that nobody uses; the last one is to be taken first. Is changed.

    Returns:
        Blocks to copy before the write, each with its target: at most one pair.
    """
    index = position // block_size
    if index == len(block_table):  # the last block is full, or there is none
        block = free.pop()
        users[block] = 1
        block_table.append(block)
        return []
    # exercise: return hole("if others use block_table[index], too, take a block of your own, and say what to copy")
    block = block_table[index]
    if users[block] == 1:
        return []
    mine = free.pop()
    users[block] -= 1
    users[mine] = 1
    block_table[index] = mine
    return [(block, mine)]
    # until here
