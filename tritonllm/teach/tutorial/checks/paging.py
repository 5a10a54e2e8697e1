"""Check of lesson 2: addresses against what the engine stored, and copy-on-write by what two sequences read."""

from types import ModuleType

from tritonllm.teach.tutorial.holes import Wrong
from tritonllm.teach.tutorial.lab import STORY, Lab, part_of

SIZE = 4


def engine_slots() -> tuple[list[int], list[int]]:
    """A block table of a sequence in a busy engine, and the slots of its tokens, found by their keys in the cache."""
    lab = Lab(block_size=SIZE, num_blocks=32, enable_prefix_caching=False)
    ids = lab.tokens(STORY, 40)
    lab.add("A", ids[:6], 9)
    lab.step()
    lab.add("B", ids[20:31], 9)
    while len(lab.steps) < 8:
        lab.step()
    table = list(part_of(lab.steps[-1], "A").block_ids)
    known = ids[:6] + list(lab.outputs["A"].outputs[0].token_ids)[:-1]
    alone = Lab(block_size=SIZE, num_blocks=32, enable_prefix_caching=False)
    alone.ask("A", known, 1)
    keys = alone.runner.caches.views[0].k.flatten(0, 1)  # of layer 0: they depend on the token and its position only
    pool = lab.runner.caches.views[0].k.flatten(0, 1)
    return table, [int((pool - keys[i]).flatten(1).norm(dim=1).argmin()) for i in range(len(known))]


def check(learner: ModuleType) -> str:
    table, slots = engine_slots()
    for position, slot in enumerate(slots):
        mine = learner.slot_of(position, list(table), SIZE)
        if mine != slot:
            raise Wrong(
                f"slot_of: the engine has the block table {table} and stored token {position} in slot {slot}; you say "
                f"{mine!r}. Blocks have {SIZE} tokens: token {position} is in entry {position // SIZE} of the table."
            )
    copied = _two_writers(learner)
    return f"Right. {len(slots)} addresses are the engine's, and two sequences wrote on with {copied} copy."


def _two_writers(learner: ModuleType) -> int:
    """Two sequences share 6 tokens in blocks of 4 and write 5 more each. What does each of them read then?"""
    memory: dict[int, object] = {}
    tables = {"X": [7, 3], "Y": [7, 3]}
    users, free = {7: 2, 3: 2}, [1, 2, 4, 5, 6]
    for position in range(6):
        memory[(tables["X"][position // SIZE]) * SIZE + position % SIZE] = f"p{position}"
    copied = 0
    for position in range(6, 11):
        for name, table in tables.items():
            copies = learner.make_room(position, table, SIZE, users, free)
            if not isinstance(copies, list):
                raise Wrong(
                    f"make_room must return a list of pairs, and an empty list for no copy; it gave {copies!r}."
                )
            for source, target in copies:
                copied += 1
                for place in range(SIZE):
                    memory[target * SIZE + place] = memory.get(source * SIZE + place)
            memory[table[position // SIZE] * SIZE + position % SIZE] = f"{name}{position}"
    for name, table in tables.items():
        read = [memory.get(table[i // SIZE] * SIZE + i % SIZE) for i in range(11)]
        expected = [f"p{i}" if i < 6 else f"{name}{i}" for i in range(11)]
        if read != expected:
            raise Wrong(
                f"make_room: two sequences share 6 tokens and write 5 more each, in turns. {name} should read "
                f"{' '.join(expected)}, but reads {' '.join(map(str, read))}. Who wrote into a block that both use, or "
                "was a copy left out?"
            )
    if copied != 1:
        raise Wrong(
            f"make_room: the texts are right, but {copied} blocks were copied where 1 would do. When one of the two "
            "has a block of its own, who still uses the old one? Count down `users` for it."
        )
    counted = {block: sum(block in table for table in tables.values()) for block in users}
    if any(users[block] != count for block, count in counted.items()):
        raise Wrong(f"make_room: at the end the tables are {tables}, but users says {users}.")
    return copied
