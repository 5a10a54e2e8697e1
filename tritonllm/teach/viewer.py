"""What all modes that watch a run of ``tritonllm generate`` have in common."""

from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeVar, runtime_checkable

from tritonllm.config.beam_search_params import BeamSearchParams
from tritonllm.config.sampling_params import SamplingParams

Params = TypeVar("Params", bound=SamplingParams | BeamSearchParams)
Result = TypeVar("Result")


class Viewer(Protocol):
    """Watches an engine while it works.

    Attributes:
        shows_text: whether it shows the outputs itself, so that the command does not print them while they grow.
        engine_options: keywords of :class:`~tritonllm.LLM` without which there is nothing to see.
    """

    shows_text: bool
    engine_options: Mapping[str, Any]

    def adapt(self, params: Params) -> Params:
        """The requests' parameters, with what the viewer needs to be told beside."""
        ...

    def run(self, llm: Any, work: Callable[[], Result]) -> Result:
        """Do the work, which runs ``llm``, and watch it; returns its result."""
        ...


@runtime_checkable
class Stops(Protocol):
    """A viewer that has the terminal for itself, so that outputs are printed after it, and that can be closed before
    the work is done.

    Attributes:
        stopped: whether it was closed, so that what is unfinished is aborted.
    """

    stopped: bool


def watch_all(viewers: list[Viewer], llm: Any, work: Callable[[], Result]) -> Result:
    """Do the work with all viewers around it, the first one outermost."""
    if not viewers:
        return work()
    first, *others = viewers
    return first.run(llm, lambda: watch_all(others, llm, work))
