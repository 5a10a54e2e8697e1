"""The report as Markdown."""

from collections.abc import Sequence
from typing import Any

from bench.cluster.traffic import Traffic
from bench.reports import markdown

Table = dict[str, Any]
LEAST = "least-tokens"
SHARED = "least-tokens, shared store"
TITLES = {
    "routing": "Policies by the number of GPUs",
    "seeds": "The same with other chats",
    "bounds": "Bounds on a replica's load",
    "popularity": "How many sessions share the most popular system prompt",
    "load": "More and more requests",
    "caches": "Where sessions are kept, at 5 requests/s a GPU",
    "separate": "Prompts and answers on separate GPUs",
    "failures": "GPUs that fail together",
    "routers": "Router processes that know their own requests only",
}
HEAD = ("output tokens/s a GPU", "first token, ms: p50", "p99", "between tokens: p50", "p99", "prompt cached", "missed")


def _cell(value: Any) -> str:
    if isinstance(value, str):
        return value
    return f"{value:.2g}" if isinstance(value, float) else f"{value:,}"


def number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def figures(row: Table) -> list[str]:
    """The cells below ``HEAD``."""
    times = [row[name][at] for name in ("first_token_ms", "between_tokens_ms") for at in ("p50", "p99")]
    shares = [f"{row['hit_rate']:.0%}", f"{row['over_objective']:.1%}"]
    return [number(row["output_tokens_per_second_gpu"]), *map(number, times), *shares]


def study(rows: Sequence[Table]) -> str:
    """One study's runs."""
    label = list(rows[0])[1 : list(rows[0]).index("inputs")]
    more = {"imbalance": "busiest / mean"}
    if any(row["failed"] or row["retried"] for row in rows):
        more |= {"failed": "failed", "retried": "sent again"}
    if any(row["copied_gb_per_s_gpu"] for row in rows):
        more |= {"copied_gb_per_s_gpu": "copied, GB/s a GPU"}
    cells = [
        [
            *(_cell(row[name]) for name in label),
            *figures(row),
            *(f"{row[name]:.2f}" if isinstance(row[name], float) else f"{row[name]:,}" for name in more),
        ]
        for row in rows
    ]
    return markdown([*label, *HEAD, *more.values()], cells)


def cluster(report: Table) -> str:
    """All studies, the check against measurements, and what one router takes."""
    first, each = (report["objective"][name] for name in ("first", "each"))
    span = report["span"]
    router = report["router"]
    intro = (
        f"Simulated, not measured: Llama-3.1-8B in bfloat16 on GPUs whose steps take what they took on an H200; seed "
        f"{report['seed']}, {span['seconds']:g} s after {span['warm_up']:g} s that do not count, "
        f"{report['rate']:g} requests/s for each GPU unless a table says otherwise. *Missed* is the share of requests "
        f"that failed, got their first token after {first:g} s, or took more than {1e3 * each:g} ms a token on "
        "average. *Busiest / mean* is of the seconds that requests spent at a replica."
    )
    head = ["load", "figure", "measured", "simulated", "ratio"]
    checked = [
        [r["load"], r["unit"], number(r["measured"]), number(r["simulated"]), f"{r['ratio']:.2f}"]
        for r in report["checked"]
    ]
    parts = [intro, "One simulated GPU beside the measured one:\n\n" + markdown(head, checked)]
    for name, title in TITLES.items():
        rows = [row for row in report["cluster"] if row["study"] == name]
        if rows:
            parts.append(f"{title}:\n\n{study(rows)}")
    parts.append(
        f"One router process: {number(router['request_us'])} us of processor for a request and "
        f"{number(router['event_us'])} for an event. With answers of {number(router['answer_tokens'])} tokens that is "
        f"{number(router['requests_per_second'])} requests/s, the load of {number(router['gpus'])} GPUs. To place a "
        "request takes "
        + ", ".join(f"{number(row['us'])} us among {row['gpus']:,} backends" for row in report["placing"])
        + "."
    )
    return "\n\n".join(parts)


def _missed(report: Table, study: str, **wanted: Any) -> str:
    """The share of a run's requests that missed; empty if there is no such run."""
    found = next((row for row in report["cluster"] if row["study"] == study and wanted.items() <= row.items()), None)
    return "" if found is None else f"{found['over_objective']:.1%}"


def sizes(report: Table) -> str:
    """What each number of GPUs needs of routers and of a shared store, and what policies make of it."""
    router, ways = report["router"], ("random", "least-tokens", "prefix", "session, epsilon 2", SHARED)
    rows = []
    for gpus in sorted({row["GPUs"] for row in report["cluster"] if row["study"] == "routing"}):
        rate = gpus * report["rate"]
        placed = next((number(row["us"]) for row in report["placing"] if row["gpus"] == gpus), "")
        stored = [row for row in report["cluster"] if row["study"] == "routing" and row["GPUs"] == gpus]
        link = [gpus * row["copied_gb_per_s_gpu"] for row in stored if row["policy"] == SHARED]
        missed = [_missed(report, "routing", GPUs=gpus, policy=way) for way in ways]
        needed = f"{rate / router['requests_per_second']:.1f}"
        rows.append([f"{gpus:,}", f"{rate:,.0f}", needed, placed, *missed, *(number(each) for each in link)])
    head = ["GPUs", "requests/s", "router processes, at least", "to place one, us", *(f"missed: {way}" for way in ways)]
    return markdown([*head, "read from the store, GB/s"], rows)


def remedies(report: Table) -> str:
    """What breaks in the studies, and what helps, as the share of requests that missed."""
    wide, failed = "session, epsilon 2", [row for row in report["cluster"] if row["study"] == "failures"]
    gpus = failed[0]["GPUs"] if failed else 0
    wanted: list[tuple[str, str, Table]] = [
        ("hot prefixes: placed by the prompt's beginning, no bound", "bounds", {"policy": "prefix", "epsilon": "none"}),
        ("the router's bound of 1.25 times the mean", "bounds", {"policy": "prefix", "epsilon": 0.25}),
        ("placed by a session header, the same bound", "bounds", {"policy": "session", "epsilon": 0.25}),
        ("placed by a session header, 3 times the mean", "bounds", {"policy": "session", "epsilon": 2.0}),
        ("memory: 5 requests/s a GPU, sessions on the GPU only", "caches", _kept("session", "the GPU only")),
        ("in the host's memory, too", "caches", _kept("session", "the host's memory")),
        ("in a store for all, 50 GB/s a GPU; placed anywhere", "caches", _kept(LEAST, "a shared store at 50 GB/s")),
        ("the same store at 3.1 GB/s a GPU", "caches", _kept(LEAST, "a shared store at 3.1 GB/s")),
        ("8 router processes that do not know of each other", "routers", {"routers": 8, "policy": LEAST}),
        ("64 of them", "routers", {"routers": 64, "policy": LEAST}),
        ("64 of them, placed by a session header, 3 times the mean", "routers", {"routers": 64, "policy": wide}),
        (f"8 of {gpus} GPUs fail, at 3 requests/s a GPU", "failures", {"GPUs": gpus, "lost": 8, **_rate(3.0)}),
        ("the same at 4", "failures", {"GPUs": gpus, "lost": 8, **_rate(4.0)}),
    ]
    rows = [[what, _missed(report, study, **labels), ""] for what, study, labels in wanted]
    for row in (row for row in report["cluster"] if row["study"] == "separate"):
        split, link = row["prefill : decode"], row["link"]
        what = "prompts and answers on all GPUs" if split == "mixed" else f"apart, {split} GPUs, links of {link}"
        rows.append([what, f"{row['over_objective']:.1%}", number(row["between_tokens_ms"]["p99"])])
    return markdown(["what", "missed", "between tokens, ms: p99"], rows)


def _kept(policy: str, where: str) -> Table:
    return {"policy": policy, "kept in": where}


def _rate(rate: float) -> Table:
    return {"requests/s a GPU": rate}


def breaks(report: Table) -> str:
    """The block of docs/distributed.md."""
    memory, router, traffic = report["memory"], report["router"], report["traffic"]
    mean = next(row["mean_prompt"] for row in report["cluster"] if row["study"] == "routing")
    text = (
        f"Prompts have {number(mean)} tokens on average and answers {number(router['answer_tokens'])}; a chat has "
        f"{traffic['turns']:g} turns, and the most popular of {traffic['system_prompts']} system prompts "
        f"{Traffic(**traffic).popularity()[0]:.0%} of the chats. A GPU's cache has room for "
        f"{number(memory['gpu_tokens'])} tokens ({number(memory['gpu_gb'])} GB), its part of the host's memory for "
        f"{number(memory['host_tokens'])}. One router process takes {number(router['requests_per_second'])} "
        f"requests/s with streams, the load of {number(router['gpus'])} GPUs, and "
        f"{number(router['gpus_without_streams'])} GPUs' without. *Missed* means more than "
        f"{report['objective']['first']:g} s to the first token, more than {1e3 * report['objective']['each']:g} ms a "
        "token on average, or an error."
    )
    middle = next((f"{row['GPUs']} GPUs" for row in report["cluster"] if row["study"] == "failures"), "fewer GPUs")
    below = f"Of {middle}, with {report['rate']:g} requests/s for each unless a row says otherwise:"
    return "\n\n".join([text, sizes(report), below, remedies(report)])
