"""Steps of no request, which launch what a step of their size launches. No torch."""

from dataclasses import replace

import numpy as np

from tritonllm.engine.data.step import SharedPrefix, Step
from tritonllm.engine.data.step_inputs import COLUMNS, StepInputs, StepRoom
from tritonllm.layers.segments import EMPTY, Segment, Segments, decodes, verified


def dummy_step(
    num_decodes: int,
    chunks: list[int],
    *,
    rows: int,
    width: int,
    shared: bool = False,
    longest: int = 1,
    drafts: int = 0,
) -> Step:
    """A step for the warm-up: decodes of empty sequences, and prompt chunks of so many tokens, without a past.

    It stores nothing and reads no weights' values.

    Args:
        rows: how many sequences are sampled from.
        width: the width of the block table, in blocks.
        shared: whether there is a plan for a shared prefix, which nobody shares.
        longest: what the step says of its decodes' lengths.
        drafts: how many drafts each decode has to verify.
    """
    segments = Segments(decodes(num_decodes), chunk=Segment(len(chunks), sum(chunks), max(chunks, default=0)))
    if drafts:
        segments = replace(segments, decode=EMPTY, verify=verified(num_decodes, 1 + drafts))
    room = StepRoom(segments, rows)
    arrays = {n: np.full(room.count(c.per), c.padding, dtype=c.dtype) for n, c in COLUMNS.items()}
    inputs = StepInputs(**arrays)
    inputs.decode_order[:] = np.arange(segments.decode.sequences)
    inputs.verify_starts[:] = np.arange(len(inputs.verify_starts)) * (1 + drafts)
    inputs.cu_seqlens_q[1:] = np.cumsum(chunks)
    inputs.seq_lens[:num_decodes] = 1 + drafts if drafts else 0
    inputs.seq_lens[num_decodes:] = chunks
    begin = segments.tokens - segments.chunk.tokens
    inputs.positions[begin:] = np.concatenate([np.arange(n) for n in chunks]) if chunks else 0
    inputs.logit_rows[:] = np.arange(rows)
    return Step(
        segments,
        inputs,
        block_tables=np.zeros((segments.sequences, width), dtype=np.int32),
        samples=np.zeros(segments.sequences, dtype=bool),
        longest=longest,
        shared=SharedPrefix(width, np.zeros(num_decodes, dtype=bool)) if shared else None,
    )
