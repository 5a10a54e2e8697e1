"""Launches that depend on each other and start early, captured and replayed."""

from collections.abc import Callable, Sequence

import torch


def assert_waits_for_what_it_reads(
    start: torch.Tensor, places: Sequence[torch.Tensor], links: Sequence[Callable[[], object]]
) -> None:
    """A graph of all ``links`` leaves the same bits in ``places`` as the links with a wait after each.

    Args:
        start: what ``places[0]`` begins with.
        links: each reads and writes some of the places.
    """
    places[0].copy_(start)
    for link in links:
        link()
        torch.cuda.synchronize()
    expected = [place.clone() for place in places]
    assert expected[0].isfinite().all() and expected[0].any()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        places[0].copy_(start)
        for link in links:
            link()
    for _ in range(20):
        for place in places:
            place.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        assert all(torch.equal(*both) for both in zip(places, expected, strict=True))
