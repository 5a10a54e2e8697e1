"""What an engine counts."""

from dataclasses import dataclass


@dataclass(frozen=True)
class EngineStats:
    """Counters since the engine started, and its present load.

    ``compilations_after_ready`` are kernels that this process compiled, or loaded from Triton's cache, since then: each
    made a request wait, so there should be none. ``forced_tokens`` are those of ``generated_tokens`` that nobody drew,
    for a grammar allowed no others. The last three: :class:`~tritonllm.engine.speculation.DraftCounts`.
    """

    steps: int
    prompt_tokens: int
    generated_tokens: int
    prefix_cache_query_tokens: int
    prefix_cache_hit_tokens: int
    preemptions: int
    compilations_after_ready: int
    num_running: int
    num_waiting: int
    num_blocks: int
    num_free_blocks: int
    forced_tokens: int = 0
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
