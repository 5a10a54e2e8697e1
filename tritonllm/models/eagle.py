"""EAGLE heads: one decoder layer that goes on from what the large model has computed.

A head sees of each place the token and a feature of the place before, and gives the feature of this place, from which
it goes on by itself: a draft's feature is the head's own state. Embeddings are the large model's.

- **EAGLE** and EAGLE-2 (:class:`EagleHead`), which differ in how drafts are chosen and not in the head: the feature is
  the large model's last hidden state. Token and feature go through one linear map (``fc``), and the output projection
  is the large model's. "EAGLE: Speculative Sampling Requires Rethinking Feature Uncertainty": Li et al., 2024.
- **EAGLE-3** (:class:`Eagle3Head`): the feature is a linear map (``fc``) of what the large model's layers have computed
  at three depths. Queries, keys and values see the token's embedding and the feature, each with a norm of its own. The
  output projection is the head's, over the tokens that are drafted most. "EAGLE-3: Scaling up Inference Acceleration of
  Large Language Models via Training-Time Test": Li et al., 2025.

Files are read by :mod:`tritonllm.models.eagle_files`.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from tritonllm.layers.fusion import FusionPlanner
from tritonllm.layers.linear import Embedding, Linear, put_beside
from tritonllm.layers.metadata import AttentionMetadata, KVCacheView
from tritonllm.layers.norm import BlockInput, Norm
from tritonllm.layers.residual import Stream
from tritonllm.models.decoder import Decoder
from tritonllm.models.interface import CausalLM
from tritonllm.models.slots import Slot
from tritonllm.models.spec import ModelSpec


@dataclass(frozen=True, kw_only=True)
class Eagle3Spec(ModelSpec):
    """An EAGLE-3 head: its layer, whose ``vocab_size`` is the number of tokens that it can draft, and what it reads.

    Attributes:
        target_vocab_size: the size of the large model's vocabulary.
        target_hidden_size: the size of the large model's hidden states.
        reads: the layers of the large model before which its residual stream is read.
        norm_before_residual: whether the layer adds to the normalised feature instead of the feature.
    """

    target_vocab_size: int
    target_hidden_size: int
    reads: tuple[int, ...]
    norm_before_residual: bool = False


class EagleHead(Decoder):
    """The head over a large model.

    Args:
        spec: the description of the head, from :func:`~tritonllm.models.eagle_files.read_eagle_spec`.
        target: the large model.
        bias: whether ``fc`` has a bias.
        dtype, device, max_model_len: as of :class:`Decoder`.
    """

    layer_name = "layers.0"  # in published files

    def __init__(
        self,
        spec: ModelSpec,
        target: Decoder,
        *,
        bias: bool,
        dtype: torch.dtype,
        device: torch.device,
        max_model_len: int,
    ) -> None:
        super().__init__(spec, dtype=dtype, device=device, max_model_len=max_model_len)
        for name in ("embed", "lm_head") if spec.tie_word_embeddings else ("embed",):
            delattr(self, name)  # in their place the large model's, which are no part of this module
            vars(self)[name] = target.embed
        self.fc = Linear(self._inputs, spec.hidden_size, bias=bias, dtype=dtype, device=device)
        put_beside([self.fc], self.together)
        self._target = (target,)

    @property
    def _inputs(self) -> int:
        """Elements that ``fc`` maps."""
        return 2 * self.spec.hidden_size

    def observe(
        self,
        model: CausalLM,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        metadata: AttentionMetadata,
        kv_cache: Sequence[KVCacheView],
        rows: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run the large model's step. Arguments as of :meth:`Decoder.forward`.

        Args:
            model: the large model as steps run it; it may be compiled.

        Returns:
            What :meth:`Decoder.forward` does, and the features ``[T, hidden]`` of all tokens in the head's dtype.
        """
        hidden = model(input_ids, positions, metadata, kv_cache)
        return hidden if rows is None else hidden.index_select(0, rows), hidden

    def compute(
        self,
        input_ids: torch.Tensor,
        features: torch.Tensor,
        positions: torch.Tensor,
        metadata: AttentionMetadata,
        kv_cache: Sequence[KVCacheView],
        rows: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """As :meth:`Decoder.forward`, with ``features[T, hidden]`` of the place before each token."""
        plan = self.plan(len(positions), None if rows is None else len(rows), positions.device)
        return self.run(plan, self._join(input_ids, features), positions, metadata, kv_cache, rows)[0]

    def _join(self, input_ids: torch.Tensor, features: torch.Tensor) -> Stream:
        """The stream with which the layer begins."""
        return Stream(self.fc(torch.cat([self.embed(input_ids), features], -1)), scale=self.spec.residual_multiplier)

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """The logits that the large model's output projection gives."""
        return self._target[0].compute_logits(hidden)

    @contextmanager
    def rehearsal(self) -> Iterator[None]:
        """A context for warm-up. It does nothing: there is one layer, which runs either way."""
        yield

    def own_slots(self) -> dict[str, Slot]:
        """Places of tensors that no other decoder has, by their published names."""
        return {f"fc.{name}": _whole(f"fc.{name}", tensor) for name, tensor in self.fc.named_parameters()}


class Eagle3Head(EagleHead):
    """An EAGLE-3 head over a large model.

    Args:
        spec: what :func:`~tritonllm.models.eagle_files.read_eagle_spec` said.
        own_embedding: the head has an embedding table, ``[target_vocab_size, hidden]``, in the place of the model's.
        target, bias, dtype, device, max_model_len: as of :class:`EagleHead`.

    Attributes:
        targets: ``[vocab_size]`` int64, the large model's token that each row of the output projection stands for.
    """

    spec: Eagle3Spec
    targets: torch.Tensor
    layer_name = "midlayer"

    def __init__(self, spec: Eagle3Spec, target: Decoder, *, own_embedding: bool, **options: Any) -> None:
        super().__init__(spec, target, **options)
        where: Mapping[str, Any] = {"dtype": options["dtype"], "device": options["device"]}
        if own_embedding:
            del vars(self)["embed"]
            self.embed = Embedding(spec.target_vocab_size, spec.hidden_size, **where)
        self.token_norm, self.feature_norm, self.last_norm = (
            Norm((spec.hidden_size,), spec.norm, **where) for _ in range(3)
        )
        self.fusion = FusionPlanner(self.fusion.layers, given=True)
        tokens = torch.arange(spec.vocab_size, device=where["device"])
        self.register_buffer("targets", tokens, persistent=False)

    @property
    def _inputs(self) -> int:
        return len(self.spec.reads) * self.spec.target_hidden_size

    def observe(
        self,
        model: CausalLM,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        metadata: AttentionMetadata,
        kv_cache: Sequence[KVCacheView],
        rows: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As :meth:`EagleHead.observe`; the last layer computes the wanted rows alone, as without a head."""
        assert isinstance(model, Decoder)  # `EngineConfig` and `read_draft_spec` have seen to it
        batch = input_ids, positions, metadata, kv_cache
        hidden, states = model.forward_with_states(*batch, self.spec.reads, rows)
        return hidden, self.fc(torch.cat(states, -1))

    def _join(self, input_ids: torch.Tensor, features: torch.Tensor) -> Stream:
        normed = self.feature_norm.normalize(features)
        given = BlockInput(torch.cat([self.token_norm.normalize(self.embed(input_ids)), normed], -1))
        # a copy: the stream is changed in place, and the features are kept for the steps that follow
        rows = normed if self.spec.norm_before_residual else features.clone()
        return Stream(rows, scale=self.spec.residual_multiplier, given=given)

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """``[N, hidden]`` -> ``[N, target_vocab_size]`` float32, with -inf for the tokens that the head cannot draft.

        In the large model's numbering a draft is drawn with the noise that the model draws with."""
        logits = Decoder.compute_logits(self, self.last_norm.normalize(hidden))
        everywhere = logits.new_full((len(logits), self.spec.target_vocab_size), -torch.inf)
        return everywhere.index_copy_(1, self.targets, logits)

    def own_slots(self) -> dict[str, Slot]:
        norms = {"model.layers.0.input_layernorm": "token_norm", "model.layers.0.hidden_norm": "feature_norm"}
        norms |= {"model.norm": "last_norm"}
        slots = {f"{name}.weight": _whole(f"{ours}.weight", self.token_norm.weight) for name, ours in norms.items()}
        table = {"model.embed_tokens.weight": _whole("embed.weight", self.embed.weight)}
        return {**super().own_slots(), **slots, **table}


def _whole(parameter: str, tensor: torch.Tensor | None) -> Slot:
    assert tensor is not None
    return Slot(parameter=parameter, shape=tuple(tensor.shape))
