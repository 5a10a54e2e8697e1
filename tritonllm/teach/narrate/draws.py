"""How a sequence came to its next token: the candidates, what each rule did to them, and the draw."""

import math
from collections.abc import Sequence

import torch

from tritonllm.config.sampling_params import SamplingParams
from tritonllm.teach.narrate.acts import Bar, Bars, Count, Line, Said, Share
from tritonllm.teach.narrate.filters import GREEDY, FilterRow, FilterStage
from tritonllm.teach.narrate.pieces import TokenReader

CANDIDATES = 5  # the likeliest before the rules, and as many after them
LESSONS = ("penalties", "grammar", "temperature")


def _shown(row: FilterRow, drawn: int) -> list[int]:
    """The tokens that get bars, best first."""
    best = [tensor.topk(min(CANDIDATES, len(tensor))).indices.tolist() for tensor in (row.model, row.final)]
    tokens = {*best[0], *(token for token in best[1] if row.final[token] > 0), drawn}
    return sorted(tokens, key=lambda t: (-float(row.final[t]), -float(row.model[t]), t))


def _bars(row: FilterRow, drawn: int, reader: TokenReader) -> Bars:
    bars = [
        Bar(
            piece=reader.piece(token),
            model=Share(row.model[token]),
            final=Share(row.final[token]),
            dropped_by=row.dropped_by(token),
            drawn=token == drawn,
        )
        for token in _shown(row, drawn)
    ]
    return Bars(tuple(bars))


def _stage(stage: FilterStage, before: torch.Tensor, drawn: int, reader: TokenReader, params: SamplingParams) -> Said:
    """What one rule did, with what it made of the token that was drawn in the end."""
    name = stage.name
    if name == "temperature":
        name = "temperature_low" if stage.value < 1 else "temperature_high"
    elif name == "grammar" and params.structured_outputs is None:
        name = "thought_budget"
    elif name == "grammar" and stage.left == 1:
        name = "grammar_one"
    was, now = Share(before[drawn]), Share(stage.probabilities[drawn])
    moved = {"piece": reader.text([drawn]), "was": was, "now": now}
    values = {
        "value": f"{stage.value:g}",
        "before": Count(stage.before),
        "left": Count(stage.left),
        "gone": Count(stage.before - stage.left),
        "changed": Count(stage.changed),
        "piece": reader.text([drawn]),
        "moved": Said("moved" if f"{was}" != f"{now}" else "stayed", moved),
    }
    return Said(f"stage_{name}", values)


def from_row(
    name: str, row: FilterRow, drawn: int, reader: TokenReader, params: SamplingParams, said: set[str]
) -> list[Line]:
    """Tell of a draw from a row of logits that was recorded.

    Args:
        name: the name of the sequence.
        drawn: the token that was drawn.
        params: the sampling parameters of its request.
        said: lessons that were given; new ones are added.
    """
    best = int(row.model.argmax())
    lines: list[Line] = []
    if "draw" not in said:
        said.add("draw")
        lines.append(Said("lesson_draw", {"vocab": Count(len(row.model))}, lesson=True))
    values = {"name": name, "piece": reader.text([best]), "share": Share(row.model[best])}
    lines += [Said("candidates", values), _bars(row, drawn, reader)]
    before = row.model
    for stage in row.stages:
        if stage.name != GREEDY:
            told = _stage(stage, before, drawn, reader, params)
            if stage.name in LESSONS and stage.name not in said and told.key != "stage_thought_budget":
                said.add(stage.name)
                lines.append(Said(f"lesson_{stage.name}", lesson=True))
            lines.append(told)
        before = stage.probabilities
    left = int((row.final > 0).sum())
    values = {"name": name, "piece": reader.text([drawn]), "share": Share(row.final[drawn]), "left": Count(left)}
    if params.greedy:
        lines.append(Said("drawn_greedy", values))
    elif left == 1:
        lines.append(Said("drawn_only", values))
    else:
        lines.append(Said("drawn", values))
    return lines


def from_logprobs(
    name: str, token: int, scores: Sequence[tuple[int, float]], reader: TokenReader, said: set[str]
) -> list[Line]:
    """Tell of a draw from log-probabilities, where nobody could look at the logits: the model's own candidates, and no
    rules.

    Args:
        scores: the token's own log-probability, then those of the most likely tokens, each with its token.
    """
    lines: list[Line] = []
    if "logprobs" not in said:
        said.add("logprobs")
        lines.append(Said("lesson_logprobs", lesson=True))
    likely = dict(scores)  # the token itself is often the most likely one
    bars = [
        Bar(reader.piece(t), Share(math.exp(value)), None, None, t == token)
        for t, value in sorted(likely.items(), key=lambda item: (-item[1], item[0]))
    ]
    values = {"name": name, "piece": reader.text([token]), "share": Share(math.exp(likely[token]))}
    return [*lines, Bars(tuple(bars)), Said("drawn_logprobs", values)]
