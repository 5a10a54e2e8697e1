"""Which backend a key belongs to: rendezvous hashing, with bounded loads.

Thaler and Ravishankar, "Using name-based mappings to increase hit rates" (1998): each backend has a weight for each
key, a hash of both, and the highest one wins. So a backend that leaves gives away its own keys only, and one that comes
takes its share from all.

Mirrokni, Thorup and Zadimoghaddam, "Consistent Hashing with Bounded Loads" (2016): a backend whose load is above
(1 + epsilon) times the mean is passed over, and the key goes to the next one in its own order. So what overflows from a
popular key lands at the same second backend, whose cache then has it, too.
"""

from collections.abc import Mapping, Sequence

import xxhash


def ranked(key: bytes, names: Sequence[str]) -> list[str]:
    """The names in the order in which the key prefers them. The order in which they are given does not matter."""
    seed = xxhash.xxh64_intdigest(key)
    return sorted(names, key=lambda name: (xxhash.xxh64_intdigest(name.encode(), seed), name), reverse=True)


def placed(key: bytes, loads: Mapping[str, int], epsilon: float, min_load: int = 0) -> str:
    """The backend for a key.

    The load of the one that is chosen is at most (1 + ``epsilon``) times the mean, or ``min_load`` if that is more. One
    of them always is at or below the mean, so there is always one.

    Args:
        key: what the request begins with.
        loads: of each backend, before the request is added; at least one.
        epsilon: at least 0.
        min_load: up to which a backend is never passed over.
    """
    most = max((1 + epsilon) * sum(loads.values()) / len(loads), min_load)
    return next(name for name in ranked(key, list(loads)) if loads[name] <= most)
