"""Our paged attention as attention functions of transformers, for models that the decoder does not describe.

A transformers model calls the attention function that its configuration names (``transformers.AttentionInterface``) and
hands it the keyword arguments that its own ``forward`` did not use: the step travels there, from layer to layer.

There are two functions. ``PAGED`` serves. ``PROBE`` computes nothing: it writes down what each layer asks for, masks
included, before anything is served. Masks are functions of two positions in transformers, and a mask function is
registered for ``PROBE`` alone: it keeps that function instead of making a tensor from it, so a window is read from what
the model would mask and not from what its configuration says. For ``PAGED`` none is registered, and then transformers
makes no T x T mask and does not look at the positions (it would wait for the device).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from tritonllm.kernels import batch_invariant_attention, store_kv
from tritonllm.layers.attention import paged_attention
from tritonllm.layers.metadata import AttentionMetadata, KVCacheView

PAGED = "tritonllm_paged"
PROBE = "tritonllm_probe"

# What transformers passes along for other uses. Windows and causality are in the mask.
_PASSED_ALONG = frozenset(
    {
        "cache_position",
        "dropout",
        "is_causal",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "position_embeddings",
        "position_ids",
        "sliding_window",
        "use_cache",
    }
)


_NO_STEP = "it does not pass keyword arguments on to its attention"


@dataclass(frozen=True)
class PagedStep:
    """What the attention of one step needs.

    Attributes:
        metadata: the batch.
        kv_cache: one view per layer.
        windows: per layer, the keys that a token sees, itself included; ``None`` for all.
        batch_invariant: the tokens are decodes whose bits do not depend on the batch.
        first: the number that the model gives the first of these layers: of a later stage not 0.
    """

    metadata: AttentionMetadata
    kv_cache: Sequence[KVCacheView]
    windows: Sequence[int | None]
    first: int = 0
    batch_invariant: bool = False

    def attend(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        sinks: torch.Tensor | None,
        scale: float | None,
        softcap: float,
    ) -> torch.Tensor:
        """``q[T, H, D]``, ``k[T, K, D]`` and ``v[T, K, D]`` -> ``[T, H, D]``; stores the keys and values."""
        place = layer - self.first
        cache = self.kv_cache[place]
        store_kv(k, v, cache.k, cache.v, self.metadata.slot_mapping, **cache.scales)
        if self.metadata.stored is not None:
            self.metadata.stored(place)
        options: dict[str, Any] = {"scale": scale, "window": self.windows[place], "softcap": softcap, "sinks": sinks}
        if self.batch_invariant:
            tables, starts = self.metadata.block_tables, self.metadata.decode_starts()
            batch = cache.k, cache.v, tables, starts, self.metadata.seq_lens
            out = torch.empty_like(q, memory_format=torch.contiguous_format)
            batch_invariant_attention(q, *batch, max_seqlen_q=1, out=out, **options, **cache.scales)
            return out
        return paged_attention(q, self.metadata, cache, **options)


@dataclass(frozen=True)
class Mask:
    """A mask as transformers defines it: ``visible(batch, head, query position, key position)``, elementwise.

    Attributes:
        visible: the function ``visible`` above.
        own: the model added conditions of its own, which may look at more than positions.
    """

    visible: Callable[..., torch.Tensor]
    own: bool

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of a tensor, which this is not.

        Raises:
            ValueError: whoever asks computes another mask with it, such as Doge's of the values.
        """
        raise ValueError("its attention computes a mask of its own from transformers' one")

    def window(self, length: int, device: torch.device) -> int | None:
        """How many keys a token sees, itself included, in sequences up to ``length``; ``None`` for all.

        Raises:
            ValueError: the mask is neither causal nor a causal window.
        """
        if self.own:
            raise ValueError("it masks by a rule of its own")
        keys = torch.arange(length, device=device)
        zero = keys.new_zeros(())
        # From the end backwards in growing steps: a chunk or block of any size shows as a window of another length.
        queries = [length - 1, *(length - 1 - (1 << bit) for bit in range((length - 1).bit_length()))]
        window = int(self.visible(zero, zero, keys.new_tensor(length - 1), keys).expand(length).sum())
        for query in queries:
            visible = self.visible(zero, zero, keys.new_tensor(query), keys).expand(length)
            if bool(visible[query + 1 :].any()):
                raise ValueError("its attention is not causal")
            if not bool(visible[query]):
                raise ValueError("its tokens do not see themselves: sliding_window must be null (none) or at least 1")
            if not torch.equal(visible, (keys <= query) & (keys > query - window)):
                raise ValueError(
                    f"in sequences of {length} tokens its mask is neither causal nor a sliding window; if it "
                    "masks in chunks, max_model_len of at most a chunk will do"
                )
        return None if window >= length else window


@dataclass(frozen=True)
class LayerCall:
    """One call of attention.

    Attributes:
        layer: the index of the layer.
        shape: number of key/value heads, and the head sizes of keys and values.
        mask: the mask that the model would apply.
    """

    layer: int
    shape: tuple[int, int, int]
    mask: Mask


@dataclass
class RecordedCalls:
    """The calls that a forward pass makes of ``PROBE``, in their order."""

    calls: list[LayerCall] = field(default_factory=list)


def register() -> None:
    """Make both functions known to transformers. Doing it again changes nothing."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(PAGED, _paged)
    AttentionInterface.register(PROBE, _probe)
    AttentionMaskInterface.register(PROBE, _keep_mask)


def _keep_mask(*, mask_function: Callable[..., torch.Tensor], use_vmap: bool = False, **_: Any) -> Mask:
    return Mask(mask_function, own=use_vmap)


def _paged(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: None = None,
    *,
    paged_step: PagedStep | None = None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """``query[1, H, T, D]``, ``key[1, K, T, D]`` and ``value[1, K, T, D]`` -> ``[1, T, H, D]``."""
    _check_arguments(module, others)
    if paged_step is None:
        raise ValueError(_NO_STEP)
    if attention_mask is not None:
        raise ValueError("it makes a mask that is not one of transformers' mask functions")
    q, k, v = _rows(query), _rows(key), _rows(value)
    return paged_step.attend(module.layer_idx, q, k, v, s_aux, scaling, softcap or 0.0)[None], None


def _rows(x: torch.Tensor) -> torch.Tensor:
    """``[1, H, T, D]`` -> ``[T, H, D]`` with the elements of a head side by side, as the kernels need them."""
    x = x[0].transpose(0, 1)
    return x if x.stride(-1) == 1 else x.contiguous()


def _probe(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Mask | None = None,
    *,
    paged_step: RecordedCalls | None = None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Write the call down; returns zeros of the output's shape."""
    _check_arguments(module, others)
    if paged_step is None:
        raise ValueError(_NO_STEP)
    if not isinstance(attention_mask, Mask):
        raise ValueError("it does not mask through transformers' mask functions")
    if query.shape[0] != 1 or query.shape[2] != key.shape[2]:
        raise ValueError("it attends to keys other than those of its own tokens")
    shape = (key.shape[1], key.shape[3], value.shape[3])
    paged_step.calls.append(LayerCall(module.layer_idx, shape, attention_mask))
    return value.new_zeros(1, query.shape[2], query.shape[1], value.shape[3]), None


def _check_arguments(module: Any, others: dict[str, Any]) -> None:
    if not hasattr(module, "layer_idx"):
        raise ValueError("its attention does not say which layer it belongs to")
    unknown = sorted(name for name, x in others.items() if x is not None and name not in _PASSED_ALONG)
    if unknown:
        raise ValueError(f"its attention has an argument that ours has no equivalent of: {', '.join(unknown)}")
