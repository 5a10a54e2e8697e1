"""What requests change about their logits before they are sampled: penalties, biases, bans, allowed tokens.

Each request has a seat in tensors that stay on the device. `sample` applies them while it reads the logits, and
:func:`count_tokens` notes the drawn tokens, so a step needs nothing of the host. In this order, as in vLLM:

1. Tokens seen in prompt or output: positive logits are divided by the repetition penalty, others multiplied by it
   (Keskar et al., "CTRL: a conditional transformer language model for controllable generation", 2019).
2. Tokens of the output: minus frequency penalty times count, minus presence penalty.
3. Entries: plus a value (a bias, or -inf for a ban), while the output is shorter than a limit (a minimal length bans
   what would end it) and ends with given tokens (the beginning of a bad word, whose last token is banned).
4. Tokens that are not allowed: -inf.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from tritonllm.kernels.runtime.checks import check_tensor, require
from tritonllm.kernels.runtime.registry import register_op, with_reference
from tritonllm.kernels.sampling.common import FLOAT_MAX, GROUP, RUN, clean_ref

ALWAYS = 2**31 - 1  # as a limit of the output's length: none
MOST_COUNTED = 2**15 - 1
_NO_TOKEN = 2**31 - 1


class LogitEdits(NamedTuple):
    """The state of S requests, on the device. Made by :func:`make_logit_edits`, filled by :func:`write_seat`.

    Attributes:
        prompt_mask: ``[S, ceil(V / 32)]`` int32: bit ``t % 32`` of word ``t // 32`` says that token t is in the prompt.
        output_counts: ``[S, V]`` int16: how often each token is in the output; stays at 32767.
        penalties: ``[S, 3]`` float32: repetition (1 for none), frequency, presence (0 for none).
        allowed_mask: as ``prompt_mask``: the tokens that may be drawn.
        entry_token: ``[S, E]`` int32, ascending; 2**31 - 1 where there is no entry. E is a power of two.
        entry_value: ``[S, E]`` float32, added to the token's logit.
        entry_until: ``[S, E]`` int32: the entry counts while the output is shorter.
        entry_after: ``[S, E, L]`` int32: and while the output ends with these tokens; -1 fits all. L is a power of two.
        recent: ``[S, L]`` int32: the output's last tokens, the latest last; -1 where it is shorter.
    """

    prompt_mask: torch.Tensor
    output_counts: torch.Tensor
    penalties: torch.Tensor
    allowed_mask: torch.Tensor
    entry_token: torch.Tensor
    entry_value: torch.Tensor
    entry_until: torch.Tensor
    entry_after: torch.Tensor
    recent: torch.Tensor


class Entry(NamedTuple):
    """Adds ``value`` to a token's logit while the output has fewer than ``until`` tokens and ends with ``after``."""

    token: int
    value: float
    until: int = ALWAYS
    after: Sequence[int] = ()


def make_logit_edits(
    seats: int, vocab: int, *, entries: int = 512, longest: int = 8, device: torch.device | str
) -> LogitEdits:
    """State for so many requests, none of which changes anything yet.

    Args:
        seats: S. A seat takes 2.25 bytes for each token of the vocabulary and 12 + 4 ``longest`` for each entry.
        vocab: V, the size of the vocabulary.
        entries: E, the most entries of one request; rounded up to a power of two.
        longest: L, the most tokens that an entry can ask for; rounded up to a power of two.
    """
    require(seats >= 0, f"seats must be at least 0, got {seats}")
    require(vocab > 0, f"vocab must be at least 1, got {vocab}")
    require(entries > 0 and longest > 0, f"entries and longest must be at least 1, got {entries} and {longest}")
    e, n, words = triton.next_power_of_2(entries), triton.next_power_of_2(longest), triton.cdiv(vocab, 32)

    def full(value: float, *shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.full((seats, *shape), value, dtype=dtype, device=device)

    penalties = full(0, 3, dtype=torch.float32)
    penalties[:, 0] = 1
    return LogitEdits(
        prompt_mask=full(0, words),
        output_counts=full(0, vocab, dtype=torch.int16),
        penalties=penalties,
        allowed_mask=full(-1, words),
        entry_token=full(_NO_TOKEN, e),
        entry_value=full(0, e, dtype=torch.float32),
        entry_until=full(0, e),
        entry_after=full(-1, e, n),
        recent=full(-1, n),
    )


def _mask(tokens: Sequence[int], words: int) -> torch.Tensor:
    bits = torch.zeros(words, 32, dtype=torch.int64)
    bits.view(-1)[torch.tensor(tokens, dtype=torch.int64)] = 1
    return (bits << torch.arange(32)).sum(-1).to(torch.int32)  # the highest bit becomes the sign


def write_seat(
    edits: LogitEdits,
    seat: int,
    *,
    prompt: Sequence[int] = (),
    output: Sequence[int] = (),
    repetition: float = 1.0,
    frequency: float = 0.0,
    presence: float = 0.0,
    entries: Sequence[Entry] = (),
    allowed: Sequence[int] | None = None,
) -> None:
    """Give a seat to a request, whatever it held before. Copies asynchronously; for when a request is admitted.

    Args:
        prompt, output: the request's tokens so far.
        allowed: the tokens that may be drawn; ``None`` for all.

    Raises:
        ValueError: a seat or a token outside the tensors, or more entries, or a longer ``after``, than they hold.
    """
    (seats, vocab), (_, capacity, longest) = edits.output_counts.shape, edits.entry_after.shape
    require(0 <= seat < seats, f"seat must be from 0 to {seats - 1}, got {seat}")
    require(len(entries) <= capacity, f"entries must be at most {capacity}, got {len(entries)}: make room for more")
    for name, tokens in (("prompt", prompt), ("output", output), ("allowed", allowed or ())):
        outside = [t for t in (min(tokens, default=0), max(tokens, default=0)) if not 0 <= t < vocab]
        require(not outside, f"{name} has token {outside[0] if outside else 0}, the vocabulary {vocab} tokens")
    words = edits.prompt_mask.shape[1]
    _put(edits.prompt_mask[seat], _mask(prompt, words))
    _put(edits.penalties[seat], torch.tensor([repetition, frequency, presence], dtype=torch.float32))
    everything = torch.full((words,), -1, dtype=torch.int32)
    _put(edits.allowed_mask[seat], everything if allowed is None else _mask(allowed, words))
    edits.output_counts[seat].zero_()
    if output:
        counts = torch.bincount(torch.tensor(output), minlength=vocab)
        _put(edits.output_counts[seat], counts.clamp(max=MOST_COUNTED).to(torch.int16))
    latest = list(output[-longest:])
    _put(edits.recent[seat], torch.tensor([-1] * (longest - len(latest)) + latest, dtype=torch.int32))
    _put_entries(edits, seat, entries)


def _put(target: torch.Tensor, values: torch.Tensor) -> None:
    target.copy_(values.pin_memory() if target.is_cuda else values, non_blocking=True)


def _put_entries(edits: LogitEdits, seat: int, entries: Sequence[Entry]) -> None:
    _, capacity, longest = edits.entry_after.shape
    tokens, values, until = [_NO_TOKEN] * capacity, [0.0] * capacity, [0] * capacity
    after = torch.full((capacity, longest), -1, dtype=torch.int32)
    for row, entry in enumerate(sorted(entries, key=lambda e: e.token)):
        require(len(entry.after) <= longest, f"entries may ask for at most {longest} tokens, got {len(entry.after)}")
        require(0 <= entry.token < _NO_TOKEN, f"entries must be of tokens from 0, got {entry.token}")
        tokens[row], values[row], until[row] = entry.token, entry.value, min(entry.until, ALWAYS)
        if entry.after:
            after[row, -len(entry.after) :] = torch.tensor(entry.after)
    _put(edits.entry_token[seat], torch.tensor(tokens, dtype=torch.int32))
    _put(edits.entry_value[seat], torch.tensor(values, dtype=torch.float32))
    _put(edits.entry_until[seat], torch.tensor(until, dtype=torch.int32))
    _put(edits.entry_after[seat], after)


def check_edits(edits: LogitEdits, seats: torch.Tensor, logits: torch.Tensor) -> None:
    """Check the state of requests against the logits ``[B, V]`` that it is for."""
    batch, vocab = logits.shape
    check_tensor("logits (with edits)", logits, (batch, vocab), dtype=torch.float32)
    check_tensor("seats", seats, (batch,), dtype=torch.int32, like=logits)
    count, words = len(edits.penalties), triton.cdiv(vocab, 32)
    _, entries, longest = edits.entry_after.shape
    columns = ((entries,),) * 3
    shapes = ((words,), (vocab,), (3,), (words,), *columns, (entries, longest), (longest,))
    for name, t, shape in zip(LogitEdits._fields, edits, shapes, strict=True):
        dtype = {"output_counts": torch.int16, "penalties": torch.float32, "entry_value": torch.float32}
        check_tensor(f"edits.{name}", t, (count, *shape), dtype=dtype.get(name, torch.int32), like=logits)
        require(t.is_contiguous(), f"edits.{name} must be contiguous")
    for name, n in (("entries", entries), ("longest", longest)):
        require(n == triton.next_power_of_2(n), f"edits must have a power of two of {name}, got {n}")


@triton.jit
def entries_between(edits, seat, first, end, ENTRIES: tl.constexpr):
    """The range of a seat's entries whose tokens are in [first, end)."""
    b_entry = tl.load(edits.entry_token + seat * ENTRIES + tl.arange(0, ENTRIES))
    return tl.sum((b_entry < first).to(tl.int32)), tl.sum((b_entry < end).to(tl.int32))


@triton.jit
def edit_run(
    b_x, b_group, run, V, edits, seat, step, from_entry, to_entry, ENTRIES: tl.constexpr, LONGEST: tl.constexpr
):
    """Apply a seat's edits to run ``run`` (32 tokens) of each group: [groups, RUN] logits, cleaned before and after."""
    words = tl.cdiv(V, 32)
    b_word_at = seat * words + b_group * (GROUP // RUN) + run
    m_word = b_group * (GROUP // RUN) + run < words
    b_lane = tl.arange(0, RUN)[None, :]
    b_token = b_group[:, None] * GROUP + run * RUN + b_lane
    repetition = tl.load(edits.penalties + seat * 3)
    frequency = tl.load(edits.penalties + seat * 3 + 1)
    presence = tl.load(edits.penalties + seat * 3 + 2)
    if (repetition != 1) | (frequency != 0) | (presence != 0):
        b_word = tl.load(edits.prompt_mask + b_word_at, mask=m_word, other=0)
        b_count = tl.load(edits.output_counts + seat * V + b_token, mask=b_token < V, other=0).to(tl.float32)
        m_seen = (((b_word[:, None] >> b_lane) & 1) == 1) | (b_count > 0)
        b_x = tl.where(m_seen, tl.where(b_x > 0, b_x / repetition, b_x * repetition), b_x)
        b_x = tl.where(b_count > 0, b_x - (frequency * b_count + presence), b_x)
    b_back = tl.arange(0, LONGEST)
    b_recent = tl.load(edits.recent + seat * LONGEST + b_back)
    for entry in range(from_entry, to_entry):
        at = seat * ENTRIES + entry
        b_after = tl.load(edits.entry_after + at * LONGEST + b_back)
        others = tl.sum(((b_after >= 0) & (b_after != b_recent)).to(tl.int32))
        if (others == 0) & (step < tl.load(edits.entry_until + at)):
            value = tl.load(edits.entry_value + at)
            b_x = tl.where(b_token == tl.load(edits.entry_token + at), b_x + value, b_x)
    b_word = tl.load(edits.allowed_mask + b_word_at, mask=m_word, other=0)
    b_x = tl.where(((b_word[:, None] >> b_lane) & 1) == 1, b_x, float("-inf"))
    b_x = tl.where(b_x == b_x, b_x, float("-inf"))
    return tl.minimum(b_x, FLOAT_MAX) + 0.0


def _bits(words: torch.Tensor, vocab: int) -> torch.Tensor:
    shifts = torch.arange(32, dtype=torch.int32, device=words.device)
    return ((words[..., None] >> shifts) & 1).flatten(-2)[..., :vocab].bool()


def edit_logits_ref(logits: torch.Tensor, edits: LogitEdits, seats: torch.Tensor, steps: torch.Tensor) -> torch.Tensor:
    """A copy of ``logits`` in which the rows that have a seat are edited as `sample` does it.

    Args:
        logits: ``[B, V]`` float32.
        seats: ``[B]`` int32; negative for none.
        steps: ``[B]`` int64, the lengths of the outputs.
    """
    vocab, rows = logits.shape[1], (seats >= 0).nonzero()[:, 0]
    at = LogitEdits(*(t[seats[rows].long()] for t in edits))
    repetition, frequency, presence = at.penalties.T[..., None]
    x, counts = clean_ref(logits[rows]), at.output_counts.float()
    seen = _bits(at.prompt_mask, vocab) | (counts > 0)
    x = torch.where(seen, torch.where(x > 0, x / repetition, x * repetition), x)
    x = torch.where(counts > 0, x - (frequency * counts + presence), x)
    active = ((at.entry_after < 0) | (at.entry_after == at.recent[:, None])).all(-1)
    active &= (steps[rows, None] < at.entry_until) & (at.entry_token < vocab)
    values = at.entry_value.masked_fill(~active, 0)
    x = x.scatter_add(1, at.entry_token.clamp_max(vocab - 1).long(), values)
    x = x.masked_fill(~_bits(at.allowed_mask, vocab), -torch.inf)
    return logits.index_copy(0, rows, clean_ref(x))


@triton.jit
def _count_kernel(tokens_ptr, seats_ptr, counts_ptr, recent_ptr, V, MOST: tl.constexpr, LONGEST: tl.constexpr):
    row = tl.program_id(0)
    seat = tl.load(seats_ptr + row).to(tl.int64)
    token = tl.load(tokens_ptr + row)
    if (seat >= 0) & (token >= 0) & (token < V):
        p_count = counts_ptr + seat * V + token
        count = tl.load(p_count).to(tl.int32)
        tl.store(p_count, tl.minimum(count + 1, MOST).to(tl.int16))
        b_back = tl.arange(0, LONGEST)
        b_recent = tl.load(recent_ptr + seat * LONGEST + b_back + 1, mask=b_back < LONGEST - 1, other=0)
        tl.debug_barrier()  # all threads have read them
        b_recent = tl.where(b_back == LONGEST - 1, token.to(tl.int32), b_recent)
        tl.store(recent_ptr + seat * LONGEST + b_back, b_recent)


def _count_reference(
    tokens: torch.Tensor, seats: torch.Tensor, output_counts: torch.Tensor, recent: torch.Tensor
) -> None:
    rows = ((seats >= 0) & (tokens >= 0) & (tokens < output_counts.shape[1])).nonzero()[:, 0]
    at, new = seats[rows].long(), tokens[rows].long()
    output_counts[at, new] = (output_counts[at, new].int() + 1).clamp_max(MOST_COUNTED).short()
    recent[at] = torch.cat([recent[at, 1:], new[:, None].int()], -1)


@register_op(mutates=("output_counts", "recent"), reference=_count_reference)
def _count_tokens(tokens: torch.Tensor, seats: torch.Tensor, output_counts: torch.Tensor, recent: torch.Tensor) -> None:
    if len(tokens):
        sizes = {"MOST": MOST_COUNTED, "LONGEST": recent.shape[1]}
        vocab = output_counts.shape[1]
        _count_kernel[(len(tokens),)](tokens, seats, output_counts, recent, vocab, **sizes, num_warps=1)


def count_tokens(edits: LogitEdits, seats: torch.Tensor, tokens: torch.Tensor) -> None:
    """Note the tokens that requests were given, in place: one more of each in the output.

    Args:
        seats: ``[B]`` int32, no seat twice; negative for none.
        tokens: ``[B]`` int32 or int64; outside [0, V) for none.

    Raises:
        ValueError: a wrong shape, dtype or device.
    """
    check_tensor("tokens", tokens, ("B",), dtype=(torch.int32, torch.int64), like=edits.recent)
    check_tensor("seats", seats, (len(tokens),), dtype=torch.int32, like=edits.recent)
    _count_tokens(tokens, seats, edits.output_counts, edits.recent)


count_tokens_ref = with_reference(count_tokens)
