"""Hidden states to vectors: the last token's, the first one's or the mean of a prompt, or those of all its tokens.

Nothing here waits for the device. A step may hold a part of a prompt only, so means are running sums by seat. Sums and
heads are float32; a step pools all of its prompts in a few launches, one product with a matrix of zeros and ones among
them.
"""

from collections.abc import Callable, Sequence

import numpy as np
import torch

from tritonllm.engine.data.inputs import upload
from tritonllm.engine.data.pooled_spans import PooledSpan
from tritonllm.engine.data.results import PooledRows

Head = Callable[[torch.Tensor], torch.Tensor]  # [N, hidden] float32 -> [N, outputs] float32


class Pooler:
    """Pools the prompts of steps, in the order in which they run.

    Args:
        seats: how many requests may run at once.
        hidden_size: the size of the model's hidden states.
        device: the device that the model is on.
        head: the head of a classifier or reward model; ``None`` for other models.
        projection: the layers that embeddings go through behind the model; ``None`` if the model's files have none.
    """

    def __init__(
        self,
        seats: int,
        hidden_size: int,
        device: torch.device,
        head: Head | None = None,
        projection: Head | None = None,
    ) -> None:
        self._size, self._device = (seats, hidden_size), device
        self._head, self._projection = head, projection
        self._sums: torch.Tensor | None = None

    def pool(
        self, spans: Sequence[PooledSpan], rows: torch.Tensor, everything: torch.Tensor | None
    ) -> list[PooledRows]:
        """Pool the prompts of a step.

        Args:
            spans: the spans of the pooled prompts in the step.
            rows: ``[R, hidden]``, the hidden states of the tokens that are sampled from.
            everything: ``[T, hidden]``, the hidden states of all tokens, if a span wants more than its last one.

        Returns:
            Results on the device: of prompts that end here, and of tokens that are wanted one by one.
        """
        ended = [span for span in spans if span.row >= 0 and span.pooling.how != "all"]
        vectors = self._vectors(ended, rows) if ended else None
        if everything is not None:
            summed = [span for span in spans if span.pooling.how in ("cls", "mean") and not span.in_row]
            if summed:
                sums = self._add_up(summed, everything)
                if vectors is not None:
                    vectors = self._with_sums(vectors, ended, summed, sums)
        results = [] if vectors is None else self._finish(ended, vectors)
        for span in spans:
            if span.pooling.how == "all":
                assert everything is not None
                tokens = self._through_head(everything[span.begin : span.end].float(), span.pooling.head)
                results.append(PooledRows((span.request_id,), span.first, tokens))
        return results

    def _vectors(self, ended: Sequence[PooledSpan], rows: torch.Tensor) -> torch.Tensor:
        """``[N, hidden]`` float32: of every prompt that ends, its row's."""
        (at,) = upload([np.array([span.row for span in ended], dtype=np.int64)], self._device)
        return rows.index_select(0, at).float()

    def _add_up(self, spans: Sequence[PooledSpan], everything: torch.Tensor) -> torch.Tensor:
        """Add these spans' tokens to their seats' sums (of ``cls`` the first token alone); returns those
        ``[N, hidden]``."""
        if self._sums is None:
            self._sums = torch.zeros(self._size, dtype=torch.float32, device=self._device)
        ends = [span.end if span.pooling.how == "mean" else span.begin + (span.first == 0) for span in spans]
        limits = np.array([[span.begin for span in spans], ends], dtype=np.int32)
        begun = np.array([span.first > 0 for span in spans])
        seats = np.array([span.seat for span in spans], dtype=np.int64)
        between, later, at = upload([limits, begun, seats], self._device)
        token = torch.arange(len(everything), dtype=torch.int32, device=self._device)
        mine = (token >= between[0, :, None]) & (token < between[1, :, None])
        sums = mine.float() @ everything.float()
        sums += torch.where(later[:, None], self._sums.index_select(0, at), 0.0)
        self._sums.index_copy_(0, at, sums)
        return sums

    def _with_sums(
        self, vectors: torch.Tensor, ended: Sequence[PooledSpan], summed: Sequence[PooledSpan], sums: torch.Tensor
    ) -> torch.Tensor:
        """The vectors, where sums take the place of last tokens; a mean is the sum by the prompt's length."""
        places = {span.request_id: i for i, span in enumerate(ended)}
        pairs = [(i, places[span.request_id], span) for i, span in enumerate(summed) if span.row >= 0]
        if not pairs:
            return vectors
        which, into, spans = zip(*pairs, strict=True)
        counts = [span.length if span.pooling.how == "mean" else 1 for span in spans]
        arrays = np.array(which, dtype=np.int64), np.array(into, dtype=np.int64), np.array(counts, dtype=np.float32)
        at, to, by = upload(arrays, self._device)
        return vectors.index_copy(0, to, sums.index_select(0, at) / by[:, None])

    def _finish(self, ended: Sequence[PooledSpan], vectors: torch.Tensor) -> list[PooledRows]:
        """Through the head or the projection: one result for those of a kind."""
        results = []
        for head in (False, True):
            chosen = [i for i, span in enumerate(ended) if span.pooling.head == head]
            if chosen:
                (at,) = upload([np.array(chosen, dtype=np.int64)], self._device)
                mine = vectors if len(chosen) == len(ended) else vectors.index_select(0, at)
                ids = tuple(ended[i].request_id for i in chosen)
                results.append(PooledRows(ids, 0, self._through_head(mine, head)))
        return results

    def _through_head(self, vectors: torch.Tensor, head: bool) -> torch.Tensor:
        if head:
            assert self._head is not None  # checked with the request
            return self._head(vectors)
        return vectors if self._projection is None else self._projection(vectors)
