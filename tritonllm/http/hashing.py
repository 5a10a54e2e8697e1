"""Which backend a key belongs to: rendezvous hashing, with bounded loads.

Thaler and Ravishankar, "Using name-based mappings to increase hit rates" (1998): each backend has a weight for each
key, a hash of both, and the highest one wins. So a backend that leaves gives away its own keys only, and one that comes
takes its share from all.

Mirrokni, Thorup and Zadimoghaddam, "Consistent Hashing with Bounded Loads" (2016): a backend whose load is above
(1 + epsilon) times the mean is passed over, and the key goes to the next one in its own order. So what overflows from a
popular key lands at the same second backend, whose cache then has it, too.
"""

from collections.abc import Sequence
from itertools import repeat

import xxhash


def weights_of(key: bytes, names: Sequence[bytes]) -> list[int]:
    """How much a key prefers each of the backends."""
    return list(map(xxhash.xxh64_intdigest, names, repeat(xxhash.xxh64_intdigest(key))))


def placed(key: bytes, names: Sequence[bytes], loads: Sequence[int], epsilon: float, min_load: int = 0) -> int:
    """Which of the backends a key belongs to, by its place in the list.

    Their order does not matter: two of them have the same weight for one key in 2**64.

    The load of the one that is chosen is at most (1 + ``epsilon``) times the mean, or ``min_load`` if that is more. One
    of them always is at or below the mean, so there is always one.

    Args:
        key: what the request begins with.
        names: the names of the backends, at least one; no name twice.
        loads: the load of each backend, before the request is added.
        epsilon: how far above the mean a load may be, as a part of it; at least 0.
        min_load: the load up to which a backend is never passed over.
    """
    weights = weights_of(key, names)
    most = max((1 + epsilon) * sum(loads) / len(loads), min_load)
    first = weights.index(max(weights))  # a thousand are not sorted for it
    if loads[first] <= most:
        return first
    return max((at for at, load in enumerate(loads) if load <= most), key=weights.__getitem__)
