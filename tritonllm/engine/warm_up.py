"""Steps that are run before the first request: they compile (or load) every kernel that a request may need.

Launch configurations, and with them compiled kernels, change with the power of two of a step's tokens or sequences, and
with the width of the block table. The steps below visit all of those once. They write no cache and read no weights'
values, so the same steps on meta tensors list the kernels without a GPU (:mod:`tritonllm.engine.precompile`).
"""

from collections.abc import Callable
from itertools import pairwise

import torch

from tritonllm.kernels import CascadePlan, plan_cascade
from tritonllm.layers.metadata import AttentionMetadata

Forward = Callable[[torch.Tensor, torch.Tensor, AttentionMetadata], torch.Tensor]


def warm_up_sizes(budget: int) -> list[int]:
    """Token counts of the steps: the powers of two below ``budget``, and ``budget``."""
    return [*(1 << bit for bit in range(budget.bit_length()) if 1 << bit < budget), budget]


class WarmUp:
    """Dummy steps on one device.

    Args:
        forward: ``(input_ids[T], positions[T], metadata) -> hidden[T, hidden]``.
        sample: ``hidden[R, hidden]`` to tokens: logits and every kind of sampling that requests may ask for.
        device: where the steps run.
        block_size: tokens of a cache block.
        max_model_len: the longest sequence that may come.
        max_num_seqs: most sequences of a step.
        max_num_batched_tokens: most tokens of a step.
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
        may_share: Callable[[int], bool],
    ) -> None:
        self._forward = forward
        self._sample = sample
        self._device = device
        self._block_size = block_size
        self._max_model_len = max_model_len
        self._max_num_seqs = max_num_seqs
        self._max_num_batched_tokens = max_num_batched_tokens
        self._may_share = may_share

    def run(self) -> None:
        """Every step."""
        for tokens in warm_up_sizes(self._max_num_batched_tokens):
            self.prefill_step(tokens)
        for sequences in warm_up_sizes(self._max_num_seqs):
            self.decode_step(sequences)

    def prefill_step(self, tokens: int) -> None:
        """``tokens`` prompt tokens, with logits for as many seats as they could fill."""
        length = min(tokens, self._max_model_len)
        ends = [*range(0, tokens, length), tokens]
        lengths = [end - start for start, end in pairwise(ends)]
        device = self._device
        metadata = AttentionMetadata(
            slot_mapping=torch.full((tokens,), -1, dtype=torch.int64, device=device),
            block_tables=torch.zeros(len(lengths), -(-length // self._block_size), dtype=torch.int32, device=device),
            seq_lens=torch.tensor(lengths, dtype=torch.int32).to(device),
            cu_seqlens_q=torch.tensor(ends, dtype=torch.int32).to(device),
            num_decodes=0,
            max_seqlen_q=length,
        )
        positions = (torch.arange(tokens) % length).to(device)
        hidden = self._forward(torch.zeros(tokens, dtype=torch.int32, device=device), positions, metadata)
        self._sample(hidden[: min(self._max_num_seqs, tokens)])

    def decode_step(self, sequences: int) -> None:
        """Decodes of empty sequences, with the narrowest and the widest block table: short sequences are not split,
        and the kernels for that are other ones. With a shared prefix and without."""
        device = self._device
        lengths = torch.zeros(sequences, dtype=torch.int32)
        empty = lengths.to(device)
        for width in (1, -(-self._max_model_len // self._block_size)):
            tables = torch.zeros(sequences, width, dtype=torch.int32)
            plan = plan_cascade(tables, lengths, lengths.bool(), width, self._block_size)  # on the host, as in service
            shared = CascadePlan(*(part.to(device) for part in plan))
            for cascade in (None, shared) if self._may_share(sequences) else (None,):
                metadata = AttentionMetadata(
                    slot_mapping=torch.full((sequences,), -1, dtype=torch.int64, device=device),
                    block_tables=tables.to(device),
                    seq_lens=empty,
                    cu_seqlens_q=torch.zeros(1, dtype=torch.int32, device=device),
                    num_decodes=sequences,
                    max_seqlen_q=0,
                    cascade=cascade,
                )
                self._forward(empty, empty.long(), metadata)
