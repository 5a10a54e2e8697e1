"""Steps that fuse what they are told to. On a GPU the number of rows decides; on the CPU nothing is fused."""

from dataclasses import replace

import pytest

from tritonllm.layers import linear
from tritonllm.layers.fusion import FusionLimits, FusionPlanner
from tritonllm.models.decoder import Decoder


def set_fusion(
    monkeypatch: pytest.MonkeyPatch, model: Decoder, limits: FusionLimits | None = None, *, hands_on: bool = True
) -> None:
    """From now on the model fuses up to these limits (by default nothing), whatever the sizes of its weights.

    Args:
        hands_on: what sums up the experts may compute the norm that follows.
    """
    limits = limits or FusionLimits()
    layers = [
        replace(
            layer,
            begins_norms=layer.sequential and layer.rms and not layer.router,
            sums_last=layer.sums_last and hands_on,
        )
        for layer in model.fusion.layers
    ]
    model.fusion = FusionPlanner(layers, limits, given=model.fusion.given)
    monkeypatch.setattr(linear, "few_rows", lambda x: x.shape[0] <= limits.few)
