"""Launch configurations: looked up in committed tables by GPU, op and problem, never searched while serving.

A table is ``configs/<gpu>/<op>.json``, written by ``python -m autotune --op <op>``::

    {"op": "...", "gpu": "NVIDIA H200", "triton": "3.6.0", "torch": "...", "kernel_hash": "...", "date": "...",
     "entries": [{"key": {"n": 14336, "tokens": 64}, "config": {"BLOCK": 1024, "num_warps": 4}, "us": 3.0}]}

A GPU without tables takes those of its nearest relative (:mod:`tritonllm.kernels.runtime.gpus`).

A lookup takes the entry with the nearest key: strings (and what ``EXACT`` names) must be equal, other numbers count by
the distance of their logarithms. An entry without a ``config`` says that the op's default, a plain function of the key,
was not beaten there. Then the default holds for the wanted key, but with the entry's numbers of a step
(``OF_A_STEP``): each weight has the default of its own size, not that of the weight that was measured. The default is
also taken by a GPU without a table, by a key far from all entries, and in the place of an entry that takes another
*kernel* than the default: which kernel is faster says nothing about other keys, if the default has looked at this one
and decided otherwise.

Where a model has entries, a step's numbers of tokens and the like count as the next power of two, or as the one before
if the two take different kernels and that one takes the default's. A start visits the powers of two, so a number in
between must launch what one of these launches.
"""

import functools
import json
import logging
import math
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any, NamedTuple

import torch

from tritonllm.kernels.runtime import chip
from tritonllm.kernels.runtime.gpus import Gpu, gpu_at, nearest, tuned_gpus

logger = logging.getLogger(__name__)
Config = dict[str, Any]  # constexpr arguments plus num_warps and num_stages, passed to the launch as keywords
Key = Mapping[str, int | str]

TABLES = Path(__file__).parents[1] / "configs"
EXACT = frozenset({"head_size", "itemsize", "block_m"})  # a tile that fits the chip may not fit it with another
# What changes from step to step, of all that keys say; the rest is a model's.
OF_A_STEP = frozenset({"m", "tokens", "rows", "programs", "pairs", "capacity", "max_q"})
FAR = 2.0  # a factor of four in one number, or of two in each of two


def gpu_slug(name: str) -> str:
    """``"NVIDIA H200"`` -> ``"nvidia_h200"``: the name of the GPU's folder."""
    return re.sub(r"[^a-z0-9]+", "_", name.lower()).strip("_")


@functools.cache
def load_table(slug: str, op: str) -> dict[str, Any] | None:
    path = TABLES / slug / f"{op}.json"
    return json.loads(path.read_text()) if path.exists() else None


def distance(a: Key, b: Key) -> float:
    """How far two keys are apart; infinite if a string, an ``EXACT`` number, or the set of names, differs."""
    if a.keys() != b.keys():
        return math.inf
    total = 0.0
    for name, x in a.items():
        y = b[name]
        if isinstance(x, str) or isinstance(y, str) or name in EXACT:
            if x != y:
                return math.inf
        else:
            total += abs(math.log2((x + 1) / (y + 1)))
    return total


def tables_of(gpu_name: str) -> list[str]:
    """The operations that have a table tuned on this kind of GPU."""
    return sorted(path.stem for path in (TABLES / gpu_slug(gpu_name)).glob("*.json"))


@functools.cache
def _gpu_slug_of(index: int) -> str:
    gpu = gpu_at(index)
    report_tables(gpu)
    return gpu_slug(name_in_tables(gpu))


def name_in_tables(gpu: Gpu) -> str:
    """The name of the GPU whose tables hold for this one, or its own if there are none."""
    return (nearest(gpu, tuned_gpus(TABLES)) or gpu).name


def report_tables(gpu: Gpu) -> None:
    """Log which tuning tables a GPU takes."""
    source = nearest(gpu, tuned_gpus(TABLES))
    if source is None:
        logger.warning(
            "%s has no tuning tables, nor has a GPU like it: kernels take their default launch configurations, which "
            "may be slower; `python -m autotune --all` makes tables",
            gpu.name,
        )
    elif source.name == gpu.name:
        logger.info("%s: launch configurations from the tables in %s/", gpu.name, TABLES / gpu_slug(gpu.name))
    else:
        logger.warning(
            "%s has no tuning tables: kernels take the launch configurations of the %s, its nearest relative; "
            "`python -m autotune --all` makes tables of its own",
            gpu.name,
            source.name,
        )


_gpu_of_meta: ContextVar[str | None] = ContextVar("_gpu_of_meta", default=None)


@contextmanager
def meta_tensors_on(gpu_name: str | None) -> Iterator[None]:
    """Inside the block, meta tensors stand for tensors on the GPU ``gpu_name``; ``None``: one without tables."""
    token = _gpu_of_meta.set(gpu_name)
    try:
        yield
    finally:
        _gpu_of_meta.reset(token)


def _slug_of(device: torch.device) -> str | None:
    if device.type == "cuda":
        return _gpu_slug_of(device.index or 0)
    name = _gpu_of_meta.get() if device.type == "meta" else None
    return None if name is None else gpu_slug(name)


def _beside(wanted: Key) -> tuple[Key, Key]:
    """``wanted`` with its numbers of a step turned down and up to powers of two."""
    powers = {name: math.log2(max(1, int(value))) for name, value in wanted.items() if name in OF_A_STEP}
    low, high = ({name: 1 << turn(power) for name, power in powers.items()} for turn in (math.floor, math.ceil))
    return {**wanted, **low}, {**wanted, **high}


def _of_model(key: Key) -> Key:
    return {name: value for name, value in key.items() if name not in OF_A_STEP}


def _choose_at(
    key: Key, wanted: Key, entries: list[Any], where: str, default: Callable[..., Config]
) -> tuple[Config, str]:
    """:func:`_choose` for ``wanted`` by the entry that is nearest to ``key``, whose numbers of a step are powers of
    two."""
    otherwise = default(**key)
    away, best = min(((distance(e["key"], key), e) for e in entries), key=lambda pair: pair[0])
    if away > FAR:
        return otherwise, f"the default: no entry of {where} is near"
    others = ", ".join(f"{name}={value}" for name, value in best["key"].items() if wanted[name] != value)
    entry = f"{where}, " + (f"nearest to {others}" if others else "exactly this size")
    of_step = {name: value for name, value in best["key"].items() if name in OF_A_STEP}
    tuned = best["config"] if "config" in best else default(**{**key, **of_step})
    if away > 0 and tuned.get("kernel") != otherwise.get("kernel"):
        return otherwise, f"the default: the table entry {entry}, takes another kernel"
    return dict(tuned), f"table entry {entry}" if "config" in best else f"the default, not beaten in {entry}"


def _choose(slug: str | None, op: str, default: Callable[..., Config], wanted: Key) -> tuple[Config, str]:
    """A configuration, and why this one."""
    table, where = load_table(slug, op) if slug else None, f"{slug}/{op}"
    otherwise = default(**wanted)
    if not table or not table["entries"]:
        absent = "tensors are not on a GPU" if slug is None else f"{slug} has no table of {op}"
        return otherwise, f"the default: {absent}"
    model = _of_model(wanted)
    entries = [entry for entry in table["entries"] if distance(_of_model(entry["key"]), model) <= FAR]
    if not entries:
        return otherwise, f"the default: no entry of {where} is near"
    low, high = (_choose_at(key, wanted, entries, where, default) for key in _beside(wanted))
    of_low, of_high, own = (config.get("kernel") for config in (low[0], high[0], otherwise))
    if of_high in (of_low, own):
        return high
    return low if of_low == own else (otherwise, f"the default: the entries of {where} beside it take other kernels")


@functools.lru_cache(maxsize=65536)
def _lookup(slug: str | None, op: str, default: Callable[..., Config], key: tuple[tuple[str, Any], ...]) -> Config:
    return _choose(slug, op, default, dict(key))[0]


class ConfigChoice(NamedTuple):
    """The launch configuration that an operation asked for.

    Attributes:
        op: the name of the operation's table.
        key: the key of the problem.
        config: the launch configuration that it got.
        reason: why: an entry of a table, or the default.
    """

    op: str
    key: Key
    config: Config
    reason: str


class _ChoiceWatch:
    """Notes choices, each with its reason."""

    def __init__(self) -> None:
        self.choices: list[ConfigChoice] = []
        self._reasons: dict[Any, str] = {}  # to find one takes as long as a search in a table

    def note(self, slug: str | None, op: str, default: Callable[..., Config], key: Key, config: Config) -> None:
        asked = slug, op, default, tuple(key.items())
        if asked not in self._reasons:
            self._reasons[asked] = _choose(slug, op, default, key)[1]
        self.choices.append(ConfigChoice(op, key, config, self._reasons[asked]))


class _Override:
    """Chooses for one operation."""

    def __init__(self, op: str, config: Config | Callable[..., Config]) -> None:
        self.op, self.config = op, config
        self.asked: list[dict[str, int | str]] = []

    def choose(self, key: dict[str, int | str]) -> Config:
        self.asked.append(key)
        return self.config(**key) if callable(self.config) else self.config


_seams: list[_ChoiceWatch | _Override] = []  # while it is empty, a launch pays nothing for them but to see that


@contextmanager
def _present(seam: _ChoiceWatch | _Override) -> Iterator[None]:
    _seams.append(seam)
    try:
        yield
    finally:
        _seams.remove(seam)


@contextmanager
def watched() -> Iterator[list[ConfigChoice]]:
    """Inside the block, all choices of this process's launches are noted in the list, each with its reason."""
    watch = _ChoiceWatch()
    with _present(watch):
        yield watch.choices


@contextmanager
def override(op: str, config: Config | Callable[..., Config]) -> Iterator[list[dict[str, int | str]]]:
    """Make every launch of ``op`` inside the block use ``config``, or ``config(**key)``: for the tuner and for tests.

    Yields the list of the keys that those launches ask for, as they do.
    """
    choice = _Override(op, config)
    with _present(choice):
        yield choice.asked


SMALL_STAGES = 2  # tiles in flight that fit 99 KB of shared memory, of any default for a large chip


@functools.cache
def _for_small_memory(default: Callable[..., Config]) -> Callable[..., Config]:
    """``default`` with at most ``SMALL_STAGES`` tiles in flight."""

    def small(**key: int | str) -> Config:
        config = default(**key)
        return config | {"num_stages": SMALL_STAGES} if config.get("num_stages", 0) > SMALL_STAGES else config

    return small


def _found(device: torch.device, op: str, default: Callable[..., Config], key: Key) -> Config:
    """The configuration of the table, or the default for this device."""
    slug, items = _slug_of(device), tuple(key.items())
    config = _lookup(slug, op, default, items)
    if config.get("num_stages", 0) > SMALL_STAGES and chip.has_small_memory(device):
        config = _lookup(slug, op, _for_small_memory(default), items)
    return config


def _config_with_seams(device: torch.device, op: str, default: Callable[..., Config], key: dict[str, Any]) -> Config:
    """The configuration by the innermost override of the operation; else as without one, and those who watch learn of
    it."""
    for seam in reversed(_seams):
        if isinstance(seam, _Override) and seam.op == op:
            return seam.choose(key)
    config = _found(device, op, default, key)
    for seam in _seams:
        if isinstance(seam, _ChoiceWatch):
            seam.note(_slug_of(device), op, default, key, config)
    return config


def get_config(op: str, device: torch.device, default: Callable[..., Config], **key: int | str) -> Config:
    """The launch configuration of ``op`` for a problem described by ``key``.

    Args:
        op: the table's name.
        device: where the launch goes; decides the table.
        default: ``default(**key) -> Config`` for a GPU without a table (and for the interpreter). Where a program has
            99 KB of shared memory, the stages that it asks for are limited; those of a table and of the tuner are not.
        key: numbers and strings that decide the best configuration; only capacities, never values on the device.
    """
    config = _config_with_seams(device, op, default, key) if _seams else _found(device, op, default, key)
    if "maxnreg" in config and chip.on_amd(device):
        return {name: value for name, value in config.items() if name != "maxnreg"}
    return config
