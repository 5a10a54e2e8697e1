"""What proposes the tokens that a step verifies, on the device and without the host.

A step is planned and launched before the host knows what the one before it drew. A drafter on the host would either
guess that, too, or let the device wait for it: 0.3 to 1 ms of a step of 1 to 7 ms. So drafts are made on the device, at
the beginning of the step that verifies them, from what the device knows of each seat: its tokens, the newest included.
They are a part of the captured step.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch

from tritonllm.config.checks import load_code
from tritonllm.config.engine import SpeculativeConfig
from tritonllm.config.sampling_rows import SamplingRows
from tritonllm.kernels import propose_ngrams
from tritonllm.layers.metadata import AttentionMetadata

REMEMBERED = 1 << 16  # tokens of past outputs: 256 KB, which one program of the kernel reads in some microseconds


class DraftStep(NamedTuple):
    """A step that verifies drafts of B sequences, up to G of each: what a drafter reads, and where it writes.

    Attributes:
        history: ``[S, L]`` int32, the tokens of each seat's sequence; L is 0 if the drafter does not look back.
        seats: ``[B]`` int32, whose sequences they are; -1: padding, of which nothing is proposed.
        ends: ``[B]`` int32, the position of a sequence's last token.
        counts: ``[B]`` int32, how many drafts it may have.
        ids: ``[B, G + 1]`` int32, its last token; behind it the drafts are written, and 0 where there are none.
        drafts: ``[B, G]`` int32, written: the drafts, and -1 behind them.
        positions: ``[B, G + 1]`` int64, of the last token and of the drafts.
        sampling: how B rows draw the token behind the last one; that of the i-th draft has ``steps + i``.
        metadata: what attention reads of the step: its tokens are those of ``ids``.
    """

    history: torch.Tensor
    seats: torch.Tensor
    ends: torch.Tensor
    counts: torch.Tensor
    ids: torch.Tensor
    drafts: torch.Tensor
    positions: torch.Tensor
    sampling: SamplingRows
    metadata: AttentionMetadata

    def look_back(self, **options: Any) -> None:
        """:func:`~tritonllm.kernels.propose_ngrams` of these sequences."""
        propose_ngrams(self.history, self.seats, self.ends, self.counts, self.ids, self.drafts, **options)


class Drafter(Protocol):
    """Proposes what may follow B sequences. Can be captured in a graph, and must not wait for the device.

    ``speculative_config={"method": "module:name", ...}`` takes one of the user's: ``name(max_model_len, vocab_size,
    device)`` makes it.

    Attributes:
        remembers: outputs of past requests, of which it wants to be told.
    """

    remembers: bool

    def remember(self, output: torch.Tensor) -> None:
        """The output ``[N]`` int32 of a request that has ended."""

    def propose(self, step: DraftStep) -> None:
        """Write the step's ``drafts`` and ``ids``."""


class NgramDrafter:
    """Looks for an earlier occurrence of a sequence's last tokens.

    Args:
        shortest, longest: tokens to look for.
    """

    remembers = False

    def __init__(self, shortest: int, longest: int) -> None:
        self._lengths = {"shortest": shortest, "longest": longest}

    def propose(self, step: DraftStep) -> None:
        step.look_back(**self._lengths)

    def remember(self, output: torch.Tensor) -> None:
        """Does nothing: this drafter does not look back at ended outputs."""


class SuffixDrafter:
    """Looks in the outputs of past requests, too: the last ``REMEMBERED`` tokens of them.

    Args:
        longest: tokens to look for.
        factor: drafts for each token that was found.
        device: where steps run.
    """

    remembers = True

    def __init__(self, longest: int, factor: float, device: torch.device) -> None:
        self._options = {"shortest": 1, "longest": longest, "factor": factor}
        self._past = torch.full((REMEMBERED,), -1, dtype=torch.int32, device=device)
        self._end = 0

    def remember(self, output: torch.Tensor) -> None:
        """Write it behind the last one, or from the beginning on where there is no room. A -1 stands behind each."""
        output = output[-REMEMBERED + 1 :]
        if self._end + len(output) + 1 > REMEMBERED:
            self._end = 0
        end = self._end + len(output)
        self._past[self._end : end].copy_(output)
        self._past[end] = -1
        self._end = end + 1

    def propose(self, step: DraftStep) -> None:
        step.look_back(past=self._past, **self._options)


Maker = Callable[[int, int, torch.device], Drafter]


def make_drafter(
    config: SpeculativeConfig | None, max_model_len: int, vocab_size: int, device: torch.device
) -> Drafter | None:
    """What a configuration names.

    Raises:
        ValueError: ``module:name`` that cannot be imported.
    """
    if config is None:
        return None
    if config.method == "ngram":
        return NgramDrafter(*config.lookup)
    if config.method == "suffix":
        return SuffixDrafter(config.suffix_decoding_max_tree_depth, config.suffix_decoding_max_spec_factor, device)
    if config.method == "draft_model":
        raise ValueError("speculative_config: method='draft_model' needs its model, which was not loaded")
    maker: Maker = load_code("speculative_config: method=", config.method)
    return maker(max_model_len, vocab_size, device)
