"""Why the scheduler took what it took: a step's requests, their chunks, and who had to wait."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from tritonllm.events import Part, StepPlanned
from tritonllm.teach.narrate.acts import Count, Line, Said
from tritonllm.teach.narrate.cast import Cast, Player

SHOWN = 4  # requests of a kind that get a sentence of their own in a step


@dataclass(frozen=True)
class EngineLimits:
    """The limits of the engine: what a step may hold, and what its cache is like.

    Attributes:
        seats: how many requests may run at once.
        block_tokens: how many tokens a block of the cache holds, over all ranks.
        num_blocks: how many blocks there are.
        caches: whether there is a prefix cache.
        host: whether there is memory of the host's for blocks.
    """

    seats: int
    block_tokens: int
    num_blocks: int
    caches: bool
    host: bool


def _why_so_few(part: Part, step: StepPlanned) -> str:
    """What kept a chunk from being the whole rest of its prompt."""
    share = step.prompt_share
    decodes = any(other.kind != "prefill" for other in step.parts)
    prompts = sum(other.num_tokens for other in step.parts if other.kind == "prefill")
    return "chunk_share" if decodes and share is not None and share <= prompts < step.token_budget else "chunk_budget"


def _prefill(part: Part, player: Player, step: StepPlanned) -> list[Said]:
    place = {"first": part.start, "last": part.start + part.num_tokens - 1}
    values = {
        "name": player.name,
        "tokens": Count(part.num_tokens),
        "known": Count(part.num_known_tokens),
        "cached": Count(part.cached_tokens),
        "where": Said("at_many" if part.num_tokens > 1 else "at_one", place),
        "left": Count(part.num_known_tokens - part.start - part.num_tokens),
        "budget": Count(step.token_budget),
        "share": Count(step.prompt_share or 0),
    }
    if part.admitted and part.num_tokens == 0:
        return [Said("forks", values)]
    if part.admitted and player.came:
        key = "returns"
    elif part.admitted:
        whole = part.num_tokens == part.num_known_tokens
        key = "admitted_whole" if whole else "admitted_cached" if part.cached_tokens else "admitted"
    elif part.start >= part.num_prompt_tokens:
        key = "catches_up"
    else:
        key = "continues"
    said = [Said(key, values)]
    if part.start + part.num_tokens < part.num_known_tokens:
        said.append(Said(_why_so_few(part, step), values))
    elif not part.admitted and part.start < part.num_prompt_tokens:
        said.append(Said("chunk_last", values))
    return said


def prefills(step: StepPlanned, cast: Cast) -> list[Said]:
    """Requests that come in, and prompts that go on."""
    parts = [part for part in step.parts if part.kind == "prefill" or part.admitted]
    said: list[Said] = []
    cut = [part for part in parts if part.start + part.num_tokens < part.num_known_tokens][:1]  # says most of a budget
    shown = [part for part in parts if part not in cut][: SHOWN - len(cut)] + cut
    for part in shown:
        player = cast.get(part.sequence_id)
        if player is not None:
            said += _prefill(part, player, step)
    rest = [part for part in parts if part not in shown]
    if rest:
        values = {"count": Count(len(rest)), "tokens": Count(sum(part.num_tokens for part in rest))}
        said.append(Said("more_prefills", values))
    return said


def decodes(step: StepPlanned, cast: Cast, verified: Mapping[str, int]) -> list[Said]:
    """Tell of the requests that generate in a step.

    Args:
        verified: how many guesses were found for each sequence; the step had room for more.
    """
    said = []
    plain = [cast.name(part.sequence_id) for part in step.parts if part.kind == "decode" and not part.admitted]
    if plain:
        said.append(Said("decodes", {"names": plain, "count": Count(len(plain))}))
    guessing = [part for part in step.parts if part.kind == "verify"]
    for part in guessing[:SHOWN]:
        drafts = verified.get(part.sequence_id, 0)
        position = cast.known(part) - 1
        values = {"name": cast.name(part.sequence_id), "drafts": Count(drafts), "position": position}
        said.append(Said("verifies" if drafts else "verifies_none", values))
    if len(guessing) > SHOWN:
        said.append(Said("more_verified", {"count": Count(len(guessing) - SHOWN)}))
    return said


def waits(step: StepPlanned) -> list[Said]:
    """Why those that wait were not taken."""
    if not step.num_waiting:
        return []
    return [
        Said(
            f"wait_{step.admission_end}",
            {
                "count": Count(step.num_waiting),
                "running": Count(step.num_running),
                "free": Count(step.num_free_blocks),
                "budget": Count(step.token_budget),
            },
        )
    ]


def preempted(step: StepPlanned, name: Callable[[str], str], limits: EngineLimits) -> list[Said]:
    """Who lost their blocks."""
    if not step.preempted:
        return []
    names = [name(sequence) for sequence in step.preempted]
    key = "preempted_host" if limits.host else "preempted"
    return [Said(key, {"names": names, "count": Count(len(names)), "blocks": Count(step.num_blocks)})]


def scheduled(
    step: StepPlanned,
    cast: Cast,
    limits: EngineLimits,
    verified: Mapping[str, int],
    lessons: Callable[[str], Sequence[Said]],
) -> list[Line]:
    """Tell all of what a step holds, for one that is told in full.

    Args:
        verified: see :func:`decodes`.
        lessons: gives a lesson by its name, if it was not given before.
    """
    lines: list[Line] = [*lessons("scheduler")]
    if step.preempted:
        lines += [*lessons("preempted"), *preempted(step, cast.name, limits)]
    prompts = prefills(step, cast)
    if prompts:
        lines += [*lessons("prefill"), *prompts]
    came = sum(part.admitted for part in step.parts)
    if came:
        running, free = Count(step.num_running), Count(step.num_free_blocks)
        places = {"count": Count(came), "running": running, "seats": Count(limits.seats), "free": free}
        lines.append(Said("admitted_why", places))
    if any(said.key == "chunk_share" for said in prompts):
        lines += lessons("share")
    generating = decodes(step, cast, verified)
    if any(said.key == "decodes" for said in generating):
        lines += lessons("decode")
    if any(part.kind == "verify" for part in step.parts):
        lines += lessons("drafts")
    lines += generating
    values = {"tokens": Count(step.num_tokens), "budget": Count(step.token_budget), "running": Count(step.num_running)}
    return [*lines, Said("step_tokens", values), *waits(step)]
