"""``python -m bench.report``: write docs/results.md from the files in bench/results/.

It also fills the blocks of docs/kernels.md, which sums up each operation, and of docs/distributed.md, which says what
of a cluster breaks. ``--check`` writes nothing and fails if a page is not what the files say; a test runs it. To
publish new measurements, rename their file after the GPU (``engine.json`` to ``engine-h200.json``), run this, and
commit both: a file that still has the name that its benchmark gave it is left out. Of what was measured twice on one
kind of GPU, the newer result is shown; runs of the engine that are older in all of their workloads are linked.
"""

import argparse
import datetime
import json
import statistics
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bench import tables, timeline
from bench.cluster.table import breaks
from bench.prefill_decode_table import prefill_decode
from bench.reports import LISTED, RESULTS, best_listed, facts, gpus_of, kind_of, without_others

DOCS = Path(__file__).parents[1] / "docs"
BEGIN, END = "<!-- python -m bench.report: begin -->\n", "<!-- end -->\n"
KERNELS = ("K3", "K4", "K5", "K6")
CLAIMED = {"Attention": ("K1", "K2"), "Other kernels": KERNELS, "Products of few rows": ("K7",)}
TIMELINE_ROWS = 10
UNPUBLISHED = (
    "all-reduce.json",
    "attention.json",
    "decoding.json",
    "engine.json",
    "engine-vllm.json",
    "exchange.json",
    "kernels.json",
    "kv-found.json",
    "kv-layers.json",
    "kv-link.json",
    "nano.json",
    "prefill-decode.json",
    "swap.json",
    "timeline.json",
)


@dataclass(frozen=True)
class File:
    """A results file: its name, which benchmark wrote it, and what is in it."""

    name: str
    kind: str
    data: dict[str, Any]

    @property
    def link(self) -> str:
        return f"[{self.name}](../bench/results/{self.name})"

    def head(self) -> str:
        return f"{self.link}: {facts(self.data)}"


def read(folder: Path) -> list[File]:
    """The published results files of a folder, the newest first."""
    found = []
    paths = [*folder.glob("*.json"), *folder.glob("accuracy/*.json")]
    for path in sorted(path for path in paths if path.name not in UNPUBLISHED):
        data = json.loads(path.read_text())
        kind = kind_of(data)
        if kind == "engine":  # an older run may have aims that are another GPU's
            data["rows"] = without_others(data["rows"], data["machine"].get("gpu", ""), data.get("ceilings_are"))
        if kind is not None:
            found.append(File(path.relative_to(folder).as_posix(), kind, data))
    return sorted(found, key=lambda file: file.data["date"], reverse=True)


def of_kind(files: Iterable[File], kind: str) -> list[File]:
    return [file for file in files if file.kind == kind]


def newest_of_kind(files: Iterable[File], kind: str) -> list[File]:
    """The newest of each kind of machine."""
    found: dict[str, File] = {}
    for file in of_kind(files, kind):
        found.setdefault(facts(file.data).split(" (")[0], file)
    return list(found.values())


def engines(files: Iterable[File], name: str, gpus: int = 1, *, deterministic: bool = False) -> list[File]:
    found = []
    for file in of_kind(files, "engine"):
        options = file.data.get("options", {})
        kind = gpus_of(options), options.get("deterministic", False)
        if file.data["engine"]["name"] == name and kind == (gpus, deterministic):
            found.append(file)
    return found


def newest_rows(
    files: Sequence[File], rows_of: Callable[[File], list[list[str]]], *, options: bool = False
) -> list[str]:
    """A table for each kind of GPU, with the newest run of each workload there, and links to all other runs.

    Args:
        files: runs of the engine, the newest first.
        rows_of: the cells of :func:`bench.tables.engine` for each workload of a run.
        options: say with which options each ran; a workload with others is another one.
    """
    found: dict[str, list[list[str]]] = {}
    versions: dict[str, set[str]] = {}
    older, seen = [], set[tuple[object, ...]]()
    for file in files:
        gpu, text = file.data["machine"].get("gpu", ""), tables.options_of(file.data) if options else ""
        where = gpu, json.dumps(file.data.get("options", {}), sort_keys=True)
        named = [((*where, row["workload"], row.get("model")), row) for row in file.data["rows"]]
        rows = [row for name, row in named if name not in seen]
        seen |= {name for name, row in named if "value" in row}
        if rows:
            run = f"[{file.data['date'][:10]} {file.data['commit'][:7]}](../bench/results/{file.name})"
            cells = rows_of(replace(file, data=file.data | {"rows": rows}))
            found.setdefault(gpu, []).extend([*row, text, run] for row in cells)
            versions.setdefault(gpu, set()).add(facts(file.data).partition(", commit")[0])
        else:
            older.append(f"{file.link} ({file.data['date'][:10]})")
    parts = []
    for gpu, rows in sorted(found.items()):
        where = versions[gpu].pop() if len(versions[gpu]) == 1 else gpu  # else each file has its own
        rows.sort(key=lambda row: (not row[0].startswith("W"), row[0]))
        head = [*tables.engine_head(files[0].data), "options", "run"]
        parts.append(f"{where}\n\n{tables.markdown(*without_empty(head, rows))}")
    return [*parts, f"Older runs: {', '.join(older)}."] if older else parts


def without_empty(head: Sequence[str], rows: Sequence[Sequence[str]]) -> tuple[list[str], list[list[str]]]:
    """A table without the columns in which nothing stands."""
    kept = [place for place in range(len(head)) if any(row[place] for row in rows)]
    return [head[place] for place in kept], [[row[place] for place in kept] for row in rows]


def _when(file: File) -> datetime.datetime:
    return datetime.datetime.fromisoformat(file.data["date"])


def prices(files: Sequence[File]) -> list[str]:
    """What ``deterministic=True`` costs: runs beside the nearest ones without it, of the same day and kind of GPU."""
    parts = []
    for file in engines(files, "tritonllm", deterministic=True):
        where, when = (file.data["date"][:10], file.data["machine"]["gpu"]), _when(file)
        plain = [f for f in engines(files, "tritonllm") if (f.data["date"][:10], f.data["machine"]["gpu"]) == where]
        plain.sort(key=lambda other: abs(_when(other) - when), reverse=True)  # the last one counts
        without = {row["workload"]: row["value"] for f in plain for row in f.data["rows"] if "value" in row}
        parts.append(f"{file.head()}\n\n{tables.prices(file.data, without)}")
    return parts


def same_day(file: File, files: Iterable[File]) -> dict[str, Any] | None:
    """vLLM's report from the same kind of GPU and the same day, if there is one."""
    for other in engines(files, "vllm"):
        gpus = [report.data["machine"]["gpu"] for report in (file, other)]
        if gpus[0] == gpus[1] and file.data["date"][:10] == other.data["date"][:10]:
            return other.data
    return None


def newest_cases(files: Iterable[File], groups: Sequence[str]) -> list[tuple[File, list[str]]]:
    """Files of ``bench.kernels`` with the groups that each is the newest to have."""
    left, found = list(groups), []
    for file in of_kind(files, "kernels"):
        mine = [group for group in left if any(case["group"] == group for case in file.data["cases"])]
        if mine:
            found.append((file, mine))
            left = [group for group in left if group not in mine]
    return found


def cases(files: Sequence[File]) -> list[dict[str, Any]]:
    """The newest result of every case of attention (in bfloat16) and of the kernels, without those that failed."""
    found = [row for file in of_kind(files, "attention")[:1] for row in file.data["rows"] if row["precision"] == "bf16"]
    for file, groups in newest_cases(files, (*KERNELS, "K7")):
        found += [case for case in file.data["cases"] if case["group"] in groups]
    return sorted((case for case in found if "us" in case), key=lambda case: case["group"])


def engine_claim(file: File, files: Sequence[File]) -> str:
    """How the newest run of the workloads compares with vLLM."""
    other = same_day(file, files)
    if other is None:
        peer, when = LISTED["engine"]["peer"], f"whose figures are of another day ({LISTED['date']})"
        values = {row["workload"]: row["listed"] for row in file.data["rows"] if "listed" in row}
    else:
        peer, when = f"vLLM {other['engine']['version']}", "measured on the same day"
        values = {row["workload"]: row["value"] for row in other["rows"] if "value" in row}
    rows = [row for row in file.data["rows"] if "value" in row and row["kind"] != "start" and row["workload"] in values]
    times = [tables.times_better(row, values[row["workload"]]) for row in rows]
    return (
        f"In {len(times)} engine workloads on one {file.data['machine']['gpu']}, tritonllm is {min(times):.2f} to "
        f"{max(times):.2f} times as fast as {peer}, {when}."
    )


def claims(files: Sequence[File]) -> list[str]:
    """What the newest results say, in sentences that other pages may quote; a test compares them."""
    beside = [f for f in engines(files, "tritonllm") if any("listed" in row for row in f.data["rows"])]
    most = max((len(file.data["rows"]) for file in beside), default=0)  # some runs are of a few workloads only
    found = [engine_claim(file, files) for file in beside if len(file.data["rows"]) == most][:1]
    for name, groups in CLAIMED.items():
        rows = [case for case in cases(files) if case["group"] in groups]
        torchs = [row["torch_us"] / row["us"] for row in rows if "torch_us" in row]
        others = [us / row["us"] for row in rows for _, us in [best_listed(row)] if us]
        if torchs and others:
            found.append(
                f"{name}: at least as fast as torch's own operation in {sum(t >= 1 for t in torchs)} of {len(torchs)} "
                f"cases of the same run, and as the best peer of another day in {sum(t >= 1 for t in others)} of "
                f"{len(others)}."
            )
    return found


def summary(files: Sequence[File]) -> str:
    """One row for each operation: how near its floor, and how it compares."""
    operations: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for case in cases(files):
        operations.setdefault((case["group"], case["case"].split()[0]), []).append(case)
    rows = []
    for (group, name), found in operations.items():
        percents = [case["percent"] for case in found]
        torch = [case["torch_us"] / case["us"] for case in found if "torch_us" in case]
        others = [us / case["us"] for case in found for _, us in [best_listed(case)] if us]
        floor = f"{min(percents):.0f} to {max(percents):.0f}%"
        rows.append([f"{group} {name}", str(len(found)), floor, compared(torch), compared(others)])
    head = ["operation", "cases", "floor / time", "torch, same run", f"best peer, {LISTED['date']}"]
    return tables.markdown(head, rows)


def compared(times: Sequence[float]) -> str:
    """The geometric mean of how many times faster ours is, and in how many cases it is at least as fast."""
    if not times:
        return ""
    return f"{statistics.geometric_mean(times):.2f}x ({sum(t >= 1 for t in times)} of {len(times)})"


def section(title: str, parts: Iterable[str]) -> list[str]:
    found = list(parts)
    return [f"## {title}", *found] if found else []


def results(files: Sequence[File]) -> str:
    """docs/results.md."""
    parts = [
        "# Results",
        "This page is made by `python -m bench.report` from the files in [bench/results](../bench/results). Do not "
        "edit it. [benchmarks.md](benchmarks.md) defines the workloads W1 to W6 and the floor, "
        "[kernels.md](kernels.md) says what each kernel of the groups K1 to K7 does. `2.00x` means that tritonllm "
        "takes half the time or has twice the rate. Figures with another day's date come from "
        "[listed_peers.json](../bench/listed_peers.json): the same kind of GPU, but not the same run.",
        *section("In short", ["\n".join(f"- {claim}" for claim in claims(files))]),
    ]
    ours = engines(files, "tritonllm")
    parts += section("Engine", newest_rows(ours, lambda file: tables.engine_rows(file.data, same_day(file, files))))
    vllm = newest_rows(engines(files, "vllm"), lambda file: tables.engine_rows(file.data))
    parts += section("vLLM, measured here", vllm)
    parts += section("Bits that do not depend on the batch", prices(files))
    for gpus, word in ((2, "two"), (4, "four")):
        several = engines(files, "tritonllm", gpus)
        rows = newest_rows(several, lambda file: tables.several_gpus_rows(file.data), options=True)
        parts += section(f"Engine on {word} GPUs", rows)
    sums = of_kind(files, "sums")
    parts += section("Sums over GPUs", [f"{f.head()}\n\n{tables.sums(f.data)}" for f in sums])
    ways = newest_of_kind(files, "exchange")
    parts += section("Rows to experts on other GPUs", [f"{f.head()}\n\n{tables.exchange(f.data)}" for f in ways])
    attention = of_kind(files, "attention")[:1]
    parts += section("Attention", [f"{file.head()}\n\n{tables.attention(file.data)}" for file in attention])
    kernels = [(KERNELS, "Kernels"), (("K7",), "Products")]
    for groups, title in kernels:
        found = newest_cases(files, groups)
        parts += section(title, [f"{file.head()}\n\n{tables.kernels(file.data, mine)}" for file, mine in found])
    parts += section("One decode step, kernel by kernel", timelines(files))
    for title, kind, table in (
        ("Grammars and beams", "decoding", tables.decoding),
        ("xgrammar and llguidance", "grammars", tables.grammars),
        ("The server", "serving", tables.serving),
        ("The router", "routing", tables.routing),
        ("Many GPUs, simulated", "cluster", tables.cluster),
        ("The host", "host", tables.host),
        ("The next turn of a chat", "chat-turn", tables.chat_turn),
        ("An engine in 300 lines", "nano", tables.nano),
        ("The cache's second tier", "swap", tables.swap),
        ("Blocks that leave while steps run", "kv-layers", tables.kv_layers),
        ("Blocks from GPU to GPU", "kv-link", tables.kv_link),
        ("Prefill and decode on GPUs of their own", "prefill-decode", prefill_decode),
        ("Prefixes that another replica has computed", "kv-found", tables.kv_found),
        ("Without a GPU", "cpu", tables.cpu),
        ("Parity with transformers", "parity", tables.parity),
        ("Accuracy of narrow formats", "accuracy", tables.accuracy),
    ):
        found = of_kind(files, kind) if kind == "serving" else newest_of_kind(files, kind)
        parts += section(title, [f"{file.head()}\n\n{table(file.data)}" for file in found])
    return "\n\n".join(parts) + "\n"


def timelines(files: Iterable[File]) -> list[str]:
    """The newest timeline of every workload."""
    parts: list[str] = []
    seen: set[str] = set()
    for file in of_kind(files, "timeline"):
        new = [found for found in file.data["timelines"] if found["workload"] not in seen]
        seen |= {found["workload"] for found in new}
        if new:
            parts += [file.head(), *(timeline.text(found, TIMELINE_ROWS) for found in new)]
    return parts


def filled(page: str, block: str) -> str:
    """A page with ``block`` between its markers.

    Raises:
        ValueError: the page has no markers.
    """
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"no block between {BEGIN.strip()} and {END.strip()}")
    return f"{before}{BEGIN}\n{block}\n\n{END}{after}"


def pages(folder: Path, docs: Path) -> dict[Path, str]:
    """What the pages should hold."""
    files = read(folder)
    blocks = {docs / "kernels.md": summary(files)}
    if clusters := of_kind(files, "cluster"):
        blocks[docs / "distributed.md"] = f"{clusters[0].head()}\n\n{breaks(clusters[0].data)}"
    found = {page: filled(page.read_text(encoding="utf-8"), block) for page, block in blocks.items()}
    return {docs / "results.md": results(files), **found}


def main(argv: list[str] | None = None, write: Callable[[Path, str], object] = Path.write_text) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.report", description="Write docs/results.md.")
    parser.add_argument("--results", type=Path, default=RESULTS, metavar="DIR", help="results files (%(default)s)")
    parser.add_argument("--docs", type=Path, default=DOCS, metavar="DIR", help="where pages are (%(default)s)")
    parser.add_argument("--check", action="store_true", help="write nothing; fail if a page is not up to date")
    args = parser.parse_args(argv)
    old = []
    for path, text in pages(args.results, args.docs).items():
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            old.append(path)
            if not args.check:
                write(path, text)
                print(f"wrote {path}")
    if args.check and old:
        print(f"not what bench/results says: {', '.join(map(str, old))}; run python -m bench.report", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
