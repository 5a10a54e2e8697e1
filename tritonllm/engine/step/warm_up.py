"""Steps that are run before the first request: they compile (or load) every kernel that a request may need.

Launch configurations, and with them compiled kernels, change with the power of two of a step's tokens or sequences, of
prompts with the width of the block table and the rows that are wanted of them, and of decodes with the regime of the
lengths. The steps below visit all of those once. They write no cache and read no weights' values, so the same steps on
meta tensors list the kernels without a GPU (:mod:`tritonllm.engine.start.precompile`).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import NamedTuple

import torch

from tritonllm.engine.cache.memory_fit import peak_bytes
from tritonllm.engine.data.inputs import Batch, upload_step
from tritonllm.engine.data.step import Step
from tritonllm.engine.step.dummy_step import dummy_step
from tritonllm.layers.regime import Regimes
from tritonllm.layers.segments import Segments, decodes

Forward = Callable[[Batch, torch.Tensor | None], torch.Tensor]  # a batch, the rows that are wanted -> hidden
ToTokens = Callable[[torch.Tensor], object]  # what is done with hidden[R, hidden]


MANY = 2048  # tokens of a step that is planned, and whose kernels are chosen, as of all larger ones


def warm_up_sizes(budget: int) -> list[int]:
    """Token counts of the steps, or widths: the powers of two below ``budget``, and ``budget``."""
    return [*(1 << bit for bit in range(budget.bit_length()) if 1 << bit < budget), budget]


class Work(NamedTuple):
    """The functions that steps are made of.

    Attributes:
        forward: ``(batch, rows[R] or None) -> hidden``, ``[R, hidden]`` or all T.
        sample: ``hidden[R, hidden]`` to tokens: logits and every kind of sampling that requests may ask for.
        verify: as ``sample``, for steps with drafts.
        score: computes the logits of so many tokens of a prompt, as its log-probabilities ask for.
        copy: copies blocks of the cache.
        may_share: returns whether a step of so many decodes can come with a plan for their shared prefix.
    """

    forward: Forward
    sample: ToTokens
    verify: ToTokens
    score: Callable[[int], object]
    copy: Callable[[], object]
    may_share: Callable[[int], bool]


@dataclass(frozen=True, kw_only=True)
class StepLimits:
    """The bounds of the steps that can come.

    Attributes:
        block_tokens: how many tokens a block holds, over all ranks.
        max_model_len: the length of the longest sequence, in tokens.
        max_num_seqs: the most sequences of a step.
        max_num_batched_tokens: the most tokens of a step.
        padded: tokens of steps that captured ones have by their padding; they lie between the powers of two.
        drafts: how many drafts each sequence has in a step that verifies some; 0 if there never are any.
        verified: the most sequences of such a step.
    """

    block_tokens: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    padded: Sequence[int] = ()
    drafts: int = 0
    verified: int = 0


class WarmUp:
    """Runs dummy steps on one device, so that their kernels are compiled and loaded before requests come.

    Args:
        work: the functions that steps are made of.
        limits: the bounds of the steps that can come.
        regimes: the regimes of the lengths that steps can have.
        device: the device that the steps run on.
    """

    def __init__(self, work: Work, limits: StepLimits, regimes: Regimes, device: torch.device) -> None:
        self._work, self._limits, self._regimes, self._device = work, limits, regimes, device

    def run(self) -> None:
        """Run a step of every kind that has kernels of its own."""
        self._work.copy()
        widest = -(-self._limits.max_model_len // self._limits.block_tokens)
        every_width = sorted({*warm_up_sizes(widest), widest})
        widths = sorted({*warm_up_sizes(widest)[::2], widest})  # every width: 0.2 s more, for no more kernels
        for tokens in (*warm_up_sizes(self._limits.max_num_batched_tokens), *self._limits.padded):
            self.prefill_step(tokens)
            for width in widths:
                if width * self._limits.block_tokens > tokens:
                    self.prefill_step(tokens, width, sample=False)
        # A step of many tokens may be one of many short prompts. Here they may be more than there are seats: with 7
        # query heads for each key, say, rows pass a power of two between two powers of two of the tokens.
        tokens = min(MANY, self._limits.max_num_batched_tokens)
        shorter = warm_up_sizes(self._limits.block_tokens)[:-1]
        for longest in (*shorter, *(width * self._limits.block_tokens for width in every_width)):
            if longest < tokens:
                self.prefill_step(tokens, longest=longest, sample=False)
        tokens = min(max(MANY, 2 * self._limits.max_num_seqs), self._limits.max_num_batched_tokens)
        for rows in warm_up_sizes(min(self._limits.max_num_seqs, tokens)):
            self.prefill_step(tokens, rows=rows, sample=False)
        for tokens in warm_up_sizes(self._limits.max_num_batched_tokens):
            if tokens > self._limits.max_num_seqs:  # of fewer the steps above want all, too
                self.prefill_step(tokens, all_wanted=True, sample=False)
                self._work.score(tokens)
        for sequences in warm_up_sizes(self._limits.max_num_seqs):
            bounds = self._regimes.bounds(Segments(decodes(sequences)))
            for longest in bounds:
                self.decode_step(sequences, longest=longest)
            for width in sorted({1, widest}):
                self.decode_step(sequences, width, prompt_token=True)
                for longest in bounds if self._work.may_share(sequences) else []:
                    self.decode_step(sequences, width, longest=longest, shared=True)
        for sequences in warm_up_sizes(self._limits.verified) if self._limits.drafts else []:
            for width in widths:
                if width * self._limits.block_tokens > self._limits.drafts:
                    self.verify_step(sequences, width)

    def largest_steps(self, deterministic: bool) -> None:
        """Run the steps that need most memory, which then stays with the allocator for later ones."""
        self.prefill_step(self._limits.max_num_batched_tokens)
        self._work.score(self._limits.max_num_batched_tokens)
        if deterministic:
            self._longest_decodes()

    def captured_bytes(self, deterministic: bool) -> int:
        """What graphs will take: those of steps without prompts and those with them each have memory of their own."""
        limits = self._limits
        sizes = (limits.max_num_seqs, *limits.padded[-1:])
        peaks = [peak_bytes(partial(self.prefill_step, tokens), self._device) for tokens in sizes]
        if deterministic:
            peaks[0] = max(peaks[0], peak_bytes(self._longest_decodes, self._device))
        if limits.verified:
            width = -(-(1 + limits.drafts) // limits.block_tokens)
            verify = partial(self.verify_step, limits.verified, width)
            peaks[0] = max(peaks[0], peak_bytes(verify, self._device))
        return sum(peaks)

    def _longest_decodes(self) -> None:
        """Batch-invariant attention keeps sums of segments, of each sequence as many as the longest has."""
        self.decode_step(self._limits.max_num_seqs, longest=self._limits.max_model_len)

    def prefill_step(
        self,
        tokens: int,
        width: int = 1,
        *,
        longest: int | None = None,
        rows: int | None = None,
        all_wanted: bool = False,
        sample: bool = True,
    ) -> None:
        """Run a step of ``tokens`` prompt tokens.

        Args:
            width: blocks that a sequence has room for, if that is more than it needs: before the tokens could come
                others, cached. Kernels for many keys are other ones.
            longest: tokens of a prompt; by default as many as may be.
            rows: how many tokens' logits are wanted, which are all that the last layer goes on with; by default as many
                as there are seats.
            all_wanted: whether the last layer goes on with all tokens, as where a prompt's log-probabilities are asked
                for. A step of more tokens than seats, which otherwise ends with few rows, has other launches at its
                end.
            sample: whether to end with the sampling, which is the same for every width.
        """
        length = min(tokens, self._limits.max_model_len, longest or tokens)
        lengths = [end - start for start, end in pairwise([*range(0, tokens, length), tokens])]
        rows = rows or min(self._limits.max_num_seqs, tokens)
        width = max(width, -(-length // self._limits.block_tokens))
        batch = self._upload(dummy_step(0, lengths, rows=rows, width=width))
        hidden = self._work.forward(batch, None if all_wanted or rows == tokens else batch.inputs.logit_rows)
        if sample:
            self._work.sample(hidden)

    def decode_step(
        self,
        sequences: int,
        width: int = 1,
        *,
        longest: int = 1,
        shared: bool = False,
        prompt_token: bool = False,
    ) -> None:
        """Run a step of decodes of empty sequences.

        Args:
            width: the width of the block table, in blocks; kernels of prompts and of a shared prefix depend on it.
            longest: how many keys the step says that its longest decode has.
            shared: whether the step has a plan for a shared prefix.
            prompt_token: whether there is a prompt of one token, too: a step of decodes alone has kernels of its own.
        """
        step = dummy_step(sequences, [1] * prompt_token, rows=0, width=width, shared=shared, longest=longest)
        self._work.forward(self._upload(step), None)

    def verify_step(self, sequences: int, width: int) -> None:
        """Decodes of empty sequences with drafts, and the verdict on these."""
        step = dummy_step(sequences, [], rows=sequences, width=width, drafts=self._limits.drafts)
        self._work.verify(self._work.forward(self._upload(step), None))

    def _upload(self, step: Step) -> Batch:
        bound = self._regimes.bound(step.segments, step.longest)
        return upload_step(step, step.num_rows, self._limits.block_tokens, self._device, bound)
