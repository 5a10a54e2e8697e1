"""What the host has to say about the tokens of a step, when the results of the step before are in. No torch."""

from collections.abc import Sequence

import numpy as np

from tritonllm.engine.data.plan import StepPlan
from tritonllm.engine.data.request import Request
from tritonllm.engine.data.step import Restrictions, RowMasks, RowProcessors
from tritonllm.engine.grammar.grammar import GrammarControl, masks_of


def restrictions_of(plan: StepPlan) -> Restrictions:
    """The restrictions of a plan's rows. All their tokens but those that the plan's step samples must be known, or come
    after the request's end."""
    drawing = [item.request for item in plan.scheduled if item.samples]
    controlled = [
        (row, request)
        for row, request in enumerate(drawing)
        if request.controls and not request.status.is_finished  # nobody wants the token of one that has ended
    ]
    return Restrictions(_masks(controlled), _processors(controlled))


def _masks(controlled: Sequence[tuple[int, Request]]) -> RowMasks | None:
    """What the host lets come next in these rows."""
    controls = [(row, control) for row, request in controlled for control in request.controls]
    grammars = [(row, control) for row, control in controls if isinstance(control, GrammarControl)]
    at = [row for row, _ in grammars]
    words = [masks_of([control for _, control in grammars])] if grammars else []
    for row, control in controls:
        mask = None if isinstance(control, GrammarControl) else control.mask()
        if mask is not None:
            at.append(row)
            words.append(mask[None])
    if not at:
        return None
    return RowMasks(np.array(at, dtype=np.int32), words[0] if len(words) == 1 else np.concatenate(words))


def _processors(controlled: Sequence[tuple[int, Request]]) -> tuple[RowProcessors, ...]:
    """The functions that these rows' requests brought."""
    return tuple(
        RowProcessors(
            row,
            request.request_id,
            request.params.logits_processors,
            list(request.prompt_token_ids),
            list(request.output_token_ids),
        )
        for row, request in controlled
        if request.params.logits_processors
    )
