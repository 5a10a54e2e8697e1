"""Draw tokens from vocabularies of every size, under every set of limits, and end the process if a launch does not.

``python -m support.sampling_sweep PART PARTS`` takes every PARTS-th size; `tests/kernels/sampling/test_sweep.py` runs
the parts side by side. Before each case its name is printed, so that the last line names the one that hangs.
"""

import faulthandler
import itertools
import sys

import torch

from support.compare import FLOATS
from tritonllm.kernels import rejection_sample, sample

LARGEST = 18  # 262,144 tokens
SECONDS = 60  # that the device may take for one case
ROUNDING = 1e-5  # relative, of a limit's edge
ROWS = 64
DRAFTS = 3
WITHOUT = (700, 1024)  # vocabularies for which limits are also left out: each way is a kernel to compile
SUBSETS = [names for n in range(4) for names in itertools.combinations(("top_k", "top_p", "min_p"), n)]


def vocabularies() -> list[int]:
    """Every power of two up to the largest, and its neighbours."""
    near = {(1 << bits) + offset for bits in range(LARGEST + 1) for offset in (-1, 0, 1)}
    return sorted((near | {500, 600, 700, 151936}) - {0})


def rows_of(vocab: int, g: torch.Generator) -> torch.Tensor:
    """``[ROWS, vocab]`` logits of eight kinds, in turn."""
    x = torch.randn(ROWS, vocab, generator=g) * 2
    masked = torch.rand(ROWS, vocab, generator=g)
    x[1::8] = 0.5  # all equal
    x[2::8] += 1e4
    x[3::8] = x[3::8].masked_fill(masked[3::8] < 0.9, -torch.inf)
    x[4::8] *= 1e-4  # nearly flat
    x[5::8] = x[5::8].masked_fill(masked[5::8] < 0.3, torch.nan)
    x[6::8] = x[6::8].round()  # many ties
    x[7::8, 1:] = -torch.inf  # one token
    return x


def parameters_of(vocab: int, subset: tuple[str, ...], g: torch.Generator) -> dict[str, torch.Tensor]:
    """A value for each row; those of limits outside the subset are neutral."""

    def choose(name: str, values: list[float], neutral: float, dtype: torch.dtype) -> torch.Tensor:
        chosen = torch.tensor(values if name in subset else [neutral], dtype=dtype)
        return chosen[torch.randint(len(chosen), (ROWS,), generator=g)].cuda()

    numbers = torch.randint(0, 2**40, (2, ROWS), generator=g).cuda()
    temperatures = torch.tensor([0.3, 1.0, 1.7, 1.8])[torch.randint(4, (ROWS,), generator=g)].cuda()
    return {
        "temperature": temperatures,
        "top_k": choose("top_k", [1, 2, 50, max(vocab // 2, 1), max(vocab - 1, 1)], vocab, torch.int32),
        "top_p": choose("top_p", [1e-6, 0.5, 0.9, 0.9999], 1.0, torch.float32),
        "min_p": choose("min_p", [1e-4, 0.1, 0.3, 1.0], 0.0, torch.float32),
        "seeds": numbers[0],
        "steps": numbers[1],
    }


def say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def wait(what: str) -> None:
    """For the device, but no longer than ``SECONDS``: then the process says where it is, and ends."""
    faulthandler.dump_traceback_later(SECONDS, exit=True)
    torch.cuda.synchronize()
    faulthandler.cancel_dump_traceback_later()


def assert_possible(tokens: torch.Tensor, logits: torch.Tensor, p: dict[str, torch.Tensor | None]) -> None:
    """The limits keep each of the tokens ``[R]`` of ``logits [R, V]``, by a sort in float64, give or take rounding."""
    x = logits.double().masked_fill(logits.isnan(), -torch.inf)
    order = x.sort(dim=-1, descending=True, stable=True)
    probs = torch.softmax(order.values / p["temperature"].double()[:, None], -1).nan_to_num(0.0)
    kept = order.values > -torch.inf
    if p["min_p"] is not None:
        kept &= probs >= p["min_p"].double()[:, None] * (1 - ROUNDING) * probs[:, :1]
    if p["top_k"] is not None:
        kept &= torch.arange(x.shape[1], device=x.device) < p["top_k"][:, None]
    probs = probs * kept
    if p["top_p"] is not None:
        before = (probs.cumsum(-1) - probs) / probs.sum(-1, keepdim=True)
        kept &= before <= p["top_p"].double()[:, None] * (1 + ROUNDING)
    place = (order.indices == tokens[:, None]).long().argmax(-1)
    possible = kept.gather(1, place[:, None])[:, 0] | ~(x > -torch.inf).any(-1)
    assert possible.all(), f"rows {(~possible).nonzero()[:, 0].tolist()}: tokens that their limits exclude"


def check_draws(logits: torch.Tensor, p: dict[str, torch.Tensor | None]) -> None:
    tokens = sample(logits, **p)
    wait("sample")
    assert ((tokens >= 0) & (tokens < logits.shape[1])).all()
    assert_possible(tokens, logits, p)


def check_verdicts(logits: torch.Tensor, p: dict[str, torch.Tensor | None], g: torch.Generator) -> None:
    """Every token that a sequence emits, a draft or not, is one that the target's limits keep."""
    batch, vocab = ROWS // (DRAFTS + 1), logits.shape[1]
    targets = logits.view(batch, DRAFTS + 1, vocab)
    clean = targets[:, :DRAFTS].float().nan_to_num(-30.0, 30.0, -30.0)
    probs = torch.softmax(clean - clean.amax(-1, keepdim=True), -1)
    ids = probs.argmax(-1)
    ids[::2, 1] = torch.randint(-1, vocab, ids[::2, 1].shape, generator=g).cuda()
    of_sequences = {name: None if t is None else t[:batch] for name, t in p.items()}
    of_rows = {name: None if t is None else t[:batch].repeat_interleave(DRAFTS + 1) for name, t in p.items()}
    for given in (probs, None):
        out, accepted = rejection_sample(ids, given, targets, **of_sequences)
        wait("rejection_sample")
        assert ((accepted >= 0) & (accepted <= DRAFTS)).all() and ((out >= -1) & (out < vocab)).all()
        emitted = torch.where(out >= 0, out, targets.masked_fill(targets.isnan(), -torch.inf).argmax(-1)).flatten()
        assert_possible(emitted, logits, of_rows)


def main(part: int, parts: int) -> None:
    cases = 0
    for vocab, dtype in itertools.product(vocabularies()[part::parts], FLOATS):
        g = torch.Generator().manual_seed(vocab)
        logits = rows_of(vocab, g).to("cuda", dtype)
        for subset in SUBSETS:
            p = parameters_of(vocab, subset, g)
            left_out = {name: None for name in ("top_k", "top_p", "min_p") if name not in subset}
            for given in (p, {**p, **left_out}) if left_out and vocab in WITHOUT and dtype is torch.float32 else (p,):
                absent = [name for name, values in given.items() if values is None]
                say(f"V={vocab} {dtype} limits={subset} None={absent}")
                check_draws(logits, given)
                check_verdicts(logits, given, g)
                cases += 1
    say(f"done: {cases} cases")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
