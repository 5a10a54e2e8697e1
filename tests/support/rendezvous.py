"""Rendezvous hashing with bounded loads as its definition says it, slowly: what the router's choices must be."""

from collections.abc import Mapping, Sequence

import xxhash


def ranked(key: bytes, names: Sequence[str]) -> list[str]:
    """The names in the order in which the key prefers them. The order in which they are given does not matter."""
    seed = xxhash.xxh64_intdigest(key)
    return sorted(names, key=lambda name: (xxhash.xxh64_intdigest(name.encode(), seed), name), reverse=True)


def placed_slowly(key: bytes, loads: Mapping[str, int], epsilon: float, min_load: int = 0) -> str:
    """The first one in the key's order that is not too full."""
    most = max((1 + epsilon) * sum(loads.values()) / len(loads), min_load)
    return next(name for name in ranked(key, list(loads)) if loads[name] <= most)
