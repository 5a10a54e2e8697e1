"""From counted loads to a placement: copies of the experts with the most work, and ranks with equal work.

For each layer by itself, in two greedy steps: the next copy goes to the expert that has the largest load for each of
its copies; then copies, the largest first, go to the rank with the least load that has a slot left. After DeepSeek's
expert parallelism load balancer (EPLB, described in the DeepSeek-V3 report, 2024, section 3.4), whose hierarchical
variant keeps groups of experts on one machine; this is the global one. Last, pairs of copies change places as long as
that lowers the largest load.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import NamedTuple

from tritonllm.experts.load import ExpertLoad
from tritonllm.experts.placement import ExpertPlacement, rank_loads

# Exchanges in a layer. Each takes milliseconds; of 256 experts on 16 ranks hardly any layer finds more than ten.
MOST_EXCHANGES = 100


class Balance(NamedTuple):
    """The loads of a layer's ranks.

    Attributes:
        mean: the mean load over the ranks.
        most: the load of the rank with the most work, for which the others wait.
    """

    mean: Fraction
    most: Fraction

    @property
    def balancedness(self) -> float:
        """``mean / most``: 1 if all ranks have the same load, or none has any."""
        return float(self.mean / self.most) if self.most else 1.0


def balance_of(slots: Sequence[int], load: Sequence[int], ranks: int) -> Balance:
    """Arguments as of :func:`~tritonllm.experts.placement.rank_loads`."""
    loads = rank_loads(slots, load, ranks)
    return Balance(sum(loads, Fraction(0)) / ranks, max(loads))


def rebalance(load: ExpertLoad, ranks: int, redundant: int = 0) -> ExpertPlacement:
    """A placement for these loads. The same loads give the same placement.

    In no layer has any rank more load than the most loaded one has with the experts in their order and without copies.
    An expert is twice on one rank only if there are more copies than ranks, or if the placement could not be as good
    otherwise.

    Args:
        load: what an engine counted.
        ranks: ``tensor_parallel_size`` of the engine that will use it.
        redundant: slots of a layer, over all ranks, beside one for each expert.

    Raises:
        ValueError: slots that cannot be dealt out evenly; layers with different numbers of experts.
    """
    sizes = sorted({len(counts) for counts in load.layers.values()})
    if len(sizes) != 1:
        raise ValueError(f"layers must have equally many experts, got {sizes}")
    (experts,) = sizes
    if ranks < 1 or redundant < 0:
        raise ValueError(
            f"tensor_parallel_size must be at least 1 and num_redundant_experts at least 0, got {ranks} and {redundant}"
        )
    if (experts + redundant) % ranks:
        fit = -experts % ranks
        raise ValueError(
            f"num_redundant_experts={redundant}: with {experts} experts that is {experts + redundant} slots, which "
            f"tensor_parallel_size={ranks} must divide; take {fit}, {fit + ranks} or {fit + 2 * ranks}, say"
        )
    layers = {place: place_layer(counts, ranks, redundant) for place, counts in load.layers.items()}
    return ExpertPlacement(
        architecture=load.architecture, tensor_parallel_size=ranks, num_experts=experts, layers=layers
    )


def place_layer(load: Sequence[int], ranks: int, redundant: int) -> tuple[int, ...]:
    """The expert in each slot of one layer; arguments as of :func:`rebalance`, of one layer."""
    copies = _copies(load, ranks, redundant)
    total = sum(load) or 1
    weights = [count / total / copies[expert] for expert, count in enumerate(load)]  # of a copy
    packed = _packed(weights, copies, ranks)
    _exchange(packed, weights)
    placed = tuple(expert for rank in packed for expert in sorted(rank.experts))
    plain = in_order(len(load), ranks, redundant)
    if plain is not None and max(rank_loads(plain, load, ranks)) < max(rank_loads(placed, load, ranks)):
        return plain
    return placed


def in_order(experts: int, ranks: int, redundant: int = 0) -> tuple[int, ...] | None:
    """The experts in their order, as without a placement; ``None`` if they cannot be dealt out evenly so.

    Further slots of a rank hold its own experts once more, so its load is the same whatever their number.
    """
    if experts % ranks or redundant % ranks:
        return None
    each, more = experts // ranks, redundant // ranks
    slots = [[*range(r * each, (r + 1) * each), *(r * each + i % each for i in range(more))] for r in range(ranks)]
    return tuple(expert for own in slots for expert in sorted(own))


def _copies(load: Sequence[int], ranks: int, redundant: int) -> list[int]:
    """How many copies each expert gets: no more than ranks, while others have fewer."""
    copies = [1] * len(load)
    heap = [(ranks <= 1, Fraction(-count), 1, expert) for expert, count in enumerate(load)]
    heapq.heapify(heap)
    for _ in range(redundant):
        expert = heap[0][3]
        copies[expert] += 1
        count = copies[expert]
        heapq.heapreplace(heap, (count >= ranks, Fraction(-load[expert], count), count, expert))
    return copies


@dataclass
class _Rank:
    """What a rank has so far."""

    experts: list[int] = field(default_factory=list)
    load: float = 0.0

    def take(self, expert: int, weight: float) -> None:
        self.experts.append(expert)
        self.load += weight

    def give(self, expert: int, weight: float) -> None:
        self.experts.remove(expert)
        self.load -= weight


def _packed(weights: Sequence[float], copies: Sequence[int], ranks: int) -> list[_Rank]:
    """Copies on ranks, with equally many slots each."""
    packed = [_Rank() for _ in range(ranks)]
    each = sum(copies) // ranks
    for expert in sorted(range(len(copies)), key=lambda expert: (-weights[expert], expert)):
        for _ in range(copies[expert]):
            free = [rank for rank in packed if len(rank.experts) < each]
            rank = min(free, key=lambda rank: (rank.experts.count(expert), rank.load))
            if expert in rank.experts:
                rank = _make_room(packed, rank, expert, weights)
            rank.take(expert, weights[expert])
    return packed


def _make_room(packed: Sequence[_Rank], free: _Rank, expert: int, weights: Sequence[float]) -> _Rank:
    """A rank without this expert that gives one of its own to the rank with a free slot, which has the expert already;
    the latter if there is none."""
    moves = [
        (max(free.load + weights[other], rank.load - weights[other] + weights[expert]), place, other)
        for place, rank in enumerate(packed)
        if expert not in rank.experts
        for other in rank.experts
        if other not in free.experts
    ]
    if not moves:
        return free
    _, place, other = min(moves)
    packed[place].give(other, weights[other])
    free.take(other, weights[other])
    return packed[place]


def _exchange(packed: Sequence[_Rank], weights: Sequence[float]) -> None:
    """Let the rank with the most load change an expert for one of another rank, while that lowers the larger of both
    loads."""
    for _ in range(MOST_EXCHANGES):
        worst = max(packed, key=lambda rank: rank.load)
        found = None
        for rank in packed:
            if rank is worst:
                continue
            for mine in set(worst.experts) - set(rank.experts):
                for other in set(rank.experts) - set(worst.experts):
                    less = weights[mine] - weights[other]
                    after = max(worst.load - less, rank.load + less)
                    if after < worst.load * (1 - 1e-9) and (found is None or (after, mine, other) < found[:3]):
                        found = after, mine, other, rank
        if found is None:
            return
        _, mine, other, rank = found
        for giver, taker, expert in ((worst, rank, mine), (rank, worst, other)):
            giver.give(expert, weights[expert])
            taker.take(expert, weights[expert])


class LayerReport(NamedTuple):
    """One layer's balance with the experts in their order, ``None`` if they cannot be dealt out so, and as placed."""

    layer: int
    before: Balance | None
    after: Balance


def report(load: ExpertLoad, placement: ExpertPlacement) -> list[LayerReport]:
    """What a placement brings for these loads, layer by layer; they need not be those that it was made for.

    Raises:
        ValueError: they are of different models.
    """
    ranks = placement.tensor_parallel_size
    sizes = {place: len(counts) for place, counts in load.layers.items()}
    if sizes != dict.fromkeys(placement.layers, placement.num_experts):
        raise ValueError("the expert load and the placement are of different models")
    plain = in_order(placement.num_experts, ranks)
    return [
        LayerReport(
            place,
            None if plain is None else balance_of(plain, counts, ranks),
            balance_of(placement.layers[place], counts, ranks),
        )
        for place, counts in load.layers.items()
    ]


def overall(balances: Sequence[Balance]) -> float:
    """The balancedness of all layers together, which run one after the other: the sum of means over that of mosts."""
    return Balance(
        sum((one.mean for one in balances), Fraction(0)), sum((one.most for one in balances), Fraction(0))
    ).balancedness
