"""What an engine counts."""

from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True)
class EngineStats:
    """Counters since the engine started, and its present load.

    ``compilations_after_ready`` are kernels that this process compiled, or loaded from Triton's cache, since then: each
    made a request wait, so there should be none. ``takes_requests``: the engine is awake and has
    weights. ``forced_tokens`` are those of ``generated_tokens`` that nobody drew, for a grammar allowed no others.
    ``step_seconds`` were spent in calls of :meth:`~tritonllm.LLMEngine.step`, ``wait_seconds`` of these in waiting for
    the device: the rest is the host's.
    ``num_host_blocks`` to ``loaded_bytes`` are of the cache's tier in the host's memory; those of the connector:
    :class:`~tritonllm.engine.transfer.transfer.TransferStats`; those of drafts:
    :class:`~tritonllm.engine.schedule.speculation.DraftCounts`.
    """

    steps: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    prefix_cache_query_tokens: int = 0
    prefix_cache_hit_tokens: int = 0
    preemptions: int = 0
    compilations_after_ready: int = 0
    num_running: int = 0
    num_waiting: int = 0
    num_blocks: int = 0
    num_free_blocks: int = 0
    forced_tokens: int = 0
    num_host_blocks: int = 0
    num_used_host_blocks: int = 0
    stored_blocks: int = 0
    loaded_blocks: int = 0
    stored_bytes: int = 0
    loaded_bytes: int = 0
    kv_saved_blocks: int = 0
    kv_fetched_blocks: int = 0
    kv_missed_blocks: int = 0
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_accepted_tokens_per_pos: tuple[int, ...] = ()
    draft_seconds: float = 0.0
    step_seconds: float = 0.0
    wait_seconds: float = 0.0
    takes_requests: bool = True
    is_sleeping: bool = False


class TierStats(NamedTuple):
    """The slots of now, and totals since the start."""

    num_host_blocks: int = 0
    num_used_host_blocks: int = 0
    stored_blocks: int = 0
    loaded_blocks: int = 0
    stored_bytes: int = 0
    loaded_bytes: int = 0
