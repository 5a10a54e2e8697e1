"""Who has which block of the KV pool, for a grid of any number of cells."""

from collections.abc import Iterable, Mapping

import numpy as np

from tritonllm.telemetry.snapshot import CACHED, FREE, SHARED, USED, Cells

Table = tuple[int, ...]
_KINDS = np.frombuffer(f"{FREE}{CACHED}{USED}{SHARED}".encode(), dtype=np.uint8)


class PoolMap:
    """Block tables as they change, and blocks that nobody uses but whose contents can be found.

    To follow costs nothing but to keep what the engine says; who has a block is worked out when somebody looks.
    """

    def __init__(self) -> None:
        self.num_blocks = 0
        self._tables: dict[str, Table] = {}
        self._arrays: dict[str, tuple[Table, np.ndarray]] = {}  # of tables that were looked at
        self._cached: set[int] = set()

    def keep(self, blocks: Iterable[int]) -> None:
        """Note blocks that nobody uses and whose contents can be found."""
        self._cached.update(blocks)

    def give(self, sequence_id: str, table: Table) -> None:
        before = self._tables.get(sequence_id, ())
        if table is not before:
            self._tables[sequence_id] = table
            grown = table[: len(before)] == before
            self._cached.difference_update(table[len(before) :] if grown else table)

    def take_all_but(self, sequence_ids: Iterable[str]) -> None:
        """Take the blocks of all sequences but these."""
        for name in self._tables.keys() - sequence_ids:
            self.take(name)

    def take(self, sequence_id: str) -> None:
        self._tables.pop(sequence_id, None)
        self._arrays.pop(sequence_id, None)

    def clear(self) -> None:
        self._tables.clear()
        self._arrays.clear()
        self._cached.clear()

    def __len__(self) -> int:
        """Sequences that have blocks."""
        return len(self._tables)

    def blocks_of(self, sequence_ids: Iterable[str]) -> int:
        """How many they have, shared ones once."""
        tables = [self._tables[name] for name in sequence_ids if name in self._tables]
        return len(tables[0]) if len(tables) == 1 else len(set().union(*tables))

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    def users(self) -> np.ndarray:
        """``[num_blocks]`` int64: how many sequences have each block."""
        arrays = [self._array(name) for name in self._tables]
        together = np.concatenate(arrays) if arrays else np.zeros(0, np.int64)
        return np.bincount(together, minlength=self.num_blocks)

    def cells(self, most: int, users: np.ndarray, numbers: Mapping[str, int]) -> Cells:
        """The blocks of the pool as a grid of cells, each of which says what its blocks are and which request has them.

        Args:
            most: the most cells; if there are more blocks, a cell stands for several.
            users: see :meth:`users`.
            numbers: the number of the request of each sequence, by the sequence's id.
        """
        owner = np.full(self.num_blocks, -1, np.int64)
        for name in reversed(self._tables):  # the first of several sequences stays
            owner[self._array(name)] = numbers.get(name, -1)
        kind = np.minimum(users, 2) + (users > 0)  # 0, 2 or 3: free, used or shared
        cached = np.fromiter(self._cached, np.int64, len(self._cached))
        kind[cached] = 1
        size = max(1, -(-self.num_blocks // most))
        if size > 1:
            kind, owner = _most_frequent(kind, size), _most_frequent(owner, size)
        return Cells(size, _KINDS[kind].tobytes().decode(), tuple(owner.tolist()))

    def _array(self, name: str) -> np.ndarray:
        table, (known, array) = self._tables[name], self._arrays.get(name, (None, None))
        if array is None or known is not table:
            array = np.asarray(table, np.int64)
            self._arrays[name] = table, array
        return array


def _most_frequent(values: np.ndarray, size: int) -> np.ndarray:
    """For each ``size`` values the one that is there most often, the larger of two; -1 only where there is nothing
    else. Sorted rows have equal values side by side: the longest run."""
    count = -(-len(values) // size)
    filled = np.full(count * size, -1)
    filled[: len(values)] = values
    rows = np.sort(filled.reshape(count, size), axis=1)
    runs = np.ones_like(rows)
    for column in range(1, size):
        runs[:, column] += np.where(rows[:, column] == rows[:, column - 1], runs[:, column - 1], 0)
    runs[rows == -1] = 0
    best = size - 1 - np.argmax(runs[:, ::-1], axis=1)
    return rows[np.arange(count), best]
