"""How large a runner's steps may be: what its buffers, its first steps and its captured steps are made for."""

from collections.abc import Sequence
from dataclasses import dataclass

from tritonllm.config.engine import EngineConfig, SchedulerConfig
from tritonllm.dist.pipeline import Pipeline
from tritonllm.engine.step.room_sizes import token_sizes
from tritonllm.engine.step.step_drafts import StepDrafts
from tritonllm.models.interface import CausalLM, LayerWork

# Weights that a token meets in a layer, times tokens, for which an H200 takes as long, at 600 TFLOP/s, as the host for
# the launches: 0.9 ms, or 1.6 with experts, whose order, products and sums are more launches. (A slower host: 2.7.)
HOST_BOUND, HOST_BOUND_EXPERTS = 270_000_000_000, 480_000_000_000


@dataclass(frozen=True, kw_only=True)
class StepSizes:
    """The bounds of one runner's steps.

    Attributes:
        scheduler: the scheduler's configuration, which says how many sequences and tokens a step has at most.
        block_tokens: how many tokens a block holds, over all ranks.
        max_model_len: the longest sequence that may come, in tokens.
        captures: whether steps are captured as CUDA graphs.
        host_bound: from how many tokens of a step on the GPU takes longer than the host for its launches.
        drafts: how many drafts each sequence has in a step that verifies some; 0 if there never are any.
        verified: the most sequences of such a step.
    """

    scheduler: SchedulerConfig
    block_tokens: int
    max_model_len: int
    captures: bool
    host_bound: int
    drafts: int
    verified: int

    @classmethod
    def of(
        cls, config: EngineConfig, model: CausalLM, drafts: StepDrafts, max_model_len: int, pipe: Pipeline
    ) -> "StepSizes":
        """The sizes of a runner with these parts. All stages of ``pipe`` call it: their steps have equally many
        tokens."""
        return cls(
            scheduler=config.scheduler,
            block_tokens=config.block_tokens,
            max_model_len=max_model_len,
            captures=model.supports_graphs and not config.enforce_eager,
            host_bound=pipe.least(host_bound_tokens(model.work)),
            drafts=drafts.most,
            verified=drafts.verified,
        )

    @property
    def max_blocks(self) -> int:
        """How many blocks a sequence has at most, with those that drafts behind its last token read."""
        return -(-(self.max_model_len + self.drafts) // self.block_tokens)

    @property
    def captured_tokens(self) -> list[int]:
        """Room for prompt tokens in captured steps."""
        return token_sizes(self.scheduler.max_num_batched_tokens, self.host_bound) if self.captures else []

    @property
    def most_tokens(self) -> int:
        """How many tokens a step has at most, padding included."""
        captured = max(self.captured_tokens, default=0)
        verified = self.verified * (1 + self.drafts)
        padded = self.scheduler.max_num_seqs + max(captured, 1)  # 1: the warm-up has a prompt's token beside decodes
        return max(self.scheduler.max_num_batched_tokens, padded, verified)


def host_bound_tokens(layers: Sequence[LayerWork]) -> int:
    """Tokens of a step from which on the GPU takes longer for it than the host for launching its kernels."""
    bounds = ((HOST_BOUND_EXPERTS if layer.experts else HOST_BOUND) // max(1, layer.weights) for layer in layers)
    return min(bounds, default=0)
