"""What an engine says of its experts' work (``count_expert_load``)."""

from typing import Any

from tritonllm.experts.load import ExpertLoad
from tritonllm.layers.expert_counts import ExpertCounts
from tritonllm.models.decoder import Decoder
from tritonllm.models.interface import CausalLM


class ExpertLoadMethods:
    """What :class:`~tritonllm.engine.loop.engine.LLMEngine` has of this."""

    _runner: Any

    def expert_load(self) -> ExpertLoad:
        """How many pairs (token, expert) each expert of each layer got since the start, or since
        :meth:`reset_expert_load`. Cached prompts are not computed, so they do not count; drafts do, accepted or not. In
        the last layer only the tokens count whose hidden states are wanted. Waits for the steps that were launched.

        Raises:
            ValueError: the engine does not count (``count_expert_load``).
        """
        model, counts = self._counting()
        return ExpertLoad(model.spec.architecture, counts.read())

    def reset_expert_load(self) -> None:
        """Count from 0 again, behind the steps that were launched. Raises as :meth:`expert_load`."""
        self._counting()[1].reset()

    def _counting(self) -> tuple[CausalLM, ExpertCounts]:
        model: CausalLM = self._runner.model
        if not isinstance(model, Decoder) or model.expert_counts is None:
            raise ValueError(
                "this engine does not count what its experts do: make it with count_expert_load=True "
                "(--count-expert-load)"
            )
        return model, model.expert_counts
