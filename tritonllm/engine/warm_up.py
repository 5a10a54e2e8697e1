"""Steps that are run before the first request: they compile (or load) every kernel that a request may need.

Launch configurations, and with them compiled kernels, change with the power of two of a step's tokens or sequences, and
with the width of the block table. The steps below visit all of those once. They write no cache and read no weights'
values, so the same steps on meta tensors list the kernels without a GPU (:mod:`tritonllm.engine.precompile`).
"""

from collections.abc import Callable, Sequence
from itertools import pairwise

import torch

from tritonllm.kernels import CascadePlan, plan_cascade
from tritonllm.layers.metadata import AttentionMetadata

# (input_ids, positions, metadata, the rows that are wanted) -> hidden
Forward = Callable[[torch.Tensor, torch.Tensor, AttentionMetadata, torch.Tensor | None], torch.Tensor]


def warm_up_sizes(budget: int) -> list[int]:
    """Token counts of the steps, or widths: the powers of two below ``budget``, and ``budget``."""
    return [*(1 << bit for bit in range(budget.bit_length()) if 1 << bit < budget), budget]


class WarmUp:
    """Dummy steps on one device.

    Args:
        forward: ``(input_ids[T], positions[T], metadata, rows[R] or None) -> hidden``, ``[R, hidden]`` or all T.
        sample: ``hidden[R, hidden]`` to tokens: logits and every kind of sampling that requests may ask for.
        device: where the steps run.
        block_size: tokens of a cache block.
        max_model_len: the longest sequence that may come.
        max_num_seqs: most sequences of a step.
        max_num_batched_tokens: most tokens of a step.
        padded: tokens of larger steps, which captured ones have by their padding.
        may_share: whether a step of so many decodes can come with a plan for their shared prefix.
    """

    def __init__(
        self,
        forward: Forward,
        sample: Callable[[torch.Tensor], object],
        *,
        device: torch.device,
        block_size: int,
        max_model_len: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        padded: Sequence[int],
        may_share: Callable[[int], bool],
    ) -> None:
        self._forward = forward
        self._sample = sample
        self._device = device
        self._block_size = block_size
        self._max_model_len = max_model_len
        self._max_num_seqs = max_num_seqs
        self._max_num_batched_tokens = max_num_batched_tokens
        self._padded = padded
        self._may_share = may_share

    def run(self) -> None:
        """Every step."""
        widest = -(-self._max_model_len // self._block_size)
        widths = sorted({*warm_up_sizes(widest)[::2], widest})  # every width: 0.2 s more, for no more kernels
        for tokens in (*warm_up_sizes(self._max_num_batched_tokens), *self._padded):
            self.prefill_step(tokens)
            for width in widths:
                if width * self._block_size > tokens:
                    self.prefill_step(tokens, width, sample=False)
        for sequences in warm_up_sizes(self._max_num_seqs):
            for width in (1, widest):
                self.decode_step(sequences, width)
                self.decode_step(sequences, width, prompt_token=True)
                if self._may_share(sequences):
                    self.decode_step(sequences, width, shared=True)

    def prefill_step(self, tokens: int, width: int = 1, *, sample: bool = True) -> None:
        """``tokens`` prompt tokens, with logits for as many seats as they could fill.

        Args:
            width: blocks that a sequence has room for, if that is more than it needs: before the tokens could come
                others, cached. Kernels for many keys are other ones.
            sample: end with the sampling, which is the same for every width.
        """
        length = min(tokens, self._max_model_len)
        ends = [*range(0, tokens, length), tokens]
        lengths = [end - start for start, end in pairwise(ends)]
        device, width = self._device, max(width, -(-length // self._block_size))
        metadata = AttentionMetadata(
            slot_mapping=torch.full((tokens,), -1, dtype=torch.int64, device=device),
            block_tables=torch.zeros(len(lengths), width, dtype=torch.int32, device=device),
            seq_lens=torch.tensor(lengths, dtype=torch.int32).to(device),
            cu_seqlens_q=torch.tensor(ends, dtype=torch.int32).to(device),
            num_decodes=0,
            max_seqlen_q=length,
        )
        positions = (torch.arange(tokens) % length).to(device)
        rows = torch.arange(min(self._max_num_seqs, tokens)).to(device)
        ids = torch.zeros(tokens, dtype=torch.int32, device=device)
        hidden = self._forward(ids, positions, metadata, None if len(rows) == tokens else rows)
        if sample:
            self._sample(hidden)

    def decode_step(self, sequences: int, width: int, *, shared: bool = False, prompt_token: bool = False) -> None:
        """Decodes of empty sequences.

        Args:
            width: of the block table: short sequences are not split, and the kernels for that are other ones.
            shared: with a plan for a shared prefix.
            prompt_token: beside a prompt of one token: a step of decodes alone has kernels of its own.
        """
        device, tokens = self._device, sequences + prompt_token
        lengths = torch.zeros(sequences, dtype=torch.int32)
        tables = torch.zeros(tokens, width, dtype=torch.int32)
        plan = plan_cascade(tables, lengths, lengths.bool(), width, self._block_size) if shared else None  # on the host
        metadata = AttentionMetadata(
            slot_mapping=torch.full((tokens,), -1, dtype=torch.int64, device=device),
            block_tables=tables.to(device),
            seq_lens=torch.tensor([0] * sequences + [1] * prompt_token, dtype=torch.int32).to(device),
            cu_seqlens_q=torch.arange(1 + prompt_token, dtype=torch.int32).to(device),
            num_decodes=sequences,
            max_seqlen_q=int(prompt_token),
            decode_order=torch.arange(sequences, dtype=torch.int32).to(device),
            cascade=None if plan is None else CascadePlan(*(part.to(device) for part in plan)),
        )
        empty = torch.zeros(tokens, dtype=torch.int32, device=device)
        self._forward(empty, empty.long(), metadata, None)
