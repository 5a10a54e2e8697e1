"""``python -m bench.tables RESULTS.json``: what a benchmark wrote, as a table in Markdown.

``bench.report`` makes docs/results.md of these tables. ``2.00x`` always means that ours takes half the time of the
other, or has twice its rate.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench import timeline
from bench.cluster.table import cluster
from bench.prefill_decode_table import prefill_decode
from bench.reports import GROUPS, LISTED, best_listed, facts, kind_of, markdown, number, of_floor

Table = dict[str, Any]  # a report, as its file holds it


def engine(report: Table, same_day: Table | None = None) -> str:
    """Workloads beside floor, aim and vLLM, whose report ``same_day`` is of the same day and kind of GPU."""
    return markdown(engine_head(report), engine_rows(report, same_day))


def engine_head(report: Table) -> list[str]:
    return ["workload", report["engine"]["name"], "floor (percent of it)", "aim", "vLLM", "times better"]


def engine_rows(report: Table, same_day: Table | None = None) -> list[list[str]]:
    """The cells of :func:`engine` for each workload; without ``same_day`` beside listed figures."""
    peer = f"{LISTED['engine']['peer']}, {LISTED['date']}"
    values = {row["workload"]: row["listed"] for row in report["rows"] if "listed" in row}
    if same_day is not None:
        peer = f"vLLM {same_day['engine']['version']}, same day"
        values = {row["workload"]: row["value"] for row in same_day["rows"] if "value" in row}
    return [_workload(row, values.get(row["workload"]), peer) for row in report["rows"]]


def several_gpus(report: Table) -> str:
    """Workloads on several GPUs, as :func:`engine`."""
    return f"{options_of(report)}\n\n{markdown(engine_head(report), several_gpus_rows(report))}"


def options_of(report: Table) -> str:
    """The options with which the engine ran, other than by default."""
    return ", ".join(f"`{name}={value}`" for name, value in report["options"].items())


def several_gpus_rows(report: Table) -> list[list[str]]:
    """The cells of :func:`engine`; of tensor parallelism on GPUs that it is listed for with floor, aim and vLLM's."""
    parallel = report["options"].get("tensor_parallel_size", 1)
    listed = LISTED.get(f"engine_tp{parallel}", {"rows": {}, "peer": "", "date": ""})
    theirs = report["options"] == {"tensor_parallel_size": parallel} and report["machine"]["gpu"] == LISTED["machine"]
    rows = []
    for row in report["rows"]:
        of_all = listed["rows"].get(row["workload"], {}) if theirs else {}
        here = {name: value for name, value in row.items() if not name.startswith(("floor", "percent", "goal"))}
        if of_all and "value" in row:
            latency = row["kind"] == "latency"
            met = row["value"] <= of_all["goal"] if latency else row["value"] >= of_all["goal"]
            here |= {"floor": of_all["floor"], "percent": of_floor(row["value"], of_all["floor"], latency)}
            here |= {"goal": of_all["goal"], "goal_met": met}
        rows.append(_workload(here, of_all.get("peer"), f"{listed['peer']}, {listed['date']}"))
    return rows


def sums(report: Table) -> str:
    """Microseconds of sums over the ranks, by bytes and variant."""
    variants = list(dict.fromkeys(row["variant"] for row in report["sums"]))
    by_size: dict[int, dict[str, str]] = {}
    for row in report["sums"]:
        text = number(row["median_us"]) if "median_us" in row else "failed"
        by_size.setdefault(row["nbytes"], {})[row["variant"]] = text
    rows = [[f"{nbytes:,}", *(found.get(v, "") for v in variants)] for nbytes, found in sorted(by_size.items())]
    return f"Microseconds on {report['ranks']} GPUs\n\n{markdown(['bytes', *variants], rows)}"


def exchange(report: Table) -> str:
    """Microseconds of rows to the ranks that have their experts, and back, by columns, ranks and rows of a rank."""
    variants = list(dict.fromkeys(row["variant"] for row in report["ways"]))
    by_size: dict[tuple[int, int, int], dict[str, str]] = {}
    for row in report["ways"]:
        text = number(row["median_us"]) if "median_us" in row else "failed"
        by_size.setdefault((row["columns"], row["ranks"], row["rows"]), {})[row["variant"]] = text
    rows = [
        [*map("{:,}".format, size), *(found.get(v, "") for v in variants)] for size, found in sorted(by_size.items())
    ]
    head = f"Microseconds, {report['top_k']} experts of each row"
    return f"{head}\n\n{markdown(['columns', 'ranks', 'rows of each', *variants], rows)}"


def prices(report: Table, without: dict[str, float]) -> str:
    """Workloads of ``deterministic=True``.

    Args:
        without: the same workloads' values without it.
    """
    rows = []
    for row in report["rows"]:
        cells = _workload(row)[:3]
        plain = without.get(row["workload"])
        if plain is not None and "value" in row:
            longer = row["kind"] in ("latency", "start")
            lost = 100 * (row["value"] / plain - 1 if longer else 1 - row["value"] / plain)
            cells += [number(plain), f"{lost:.0f}% {'more time' if longer else 'fewer a second'}"]
        rows.append([*cells, *[""] * (5 - len(cells))])
    return markdown(["workload", "deterministic", "floor (percent of it)", "without", "price"], rows)


def _workload(row: Table, peer: float | None = None, whose: str = "") -> list[str]:
    if "failed" in row:
        return [row["workload"], row["failed"], *[""] * 4]
    value = f"**{number(row['value'])}** {row['unit']}"
    if "warm_value" in row:
        value += f" (warm {number(row['warm_value'])})"
    floor = f"{number(row['floor'])} ({row['percent']:.0f}%)" if "floor" in row else ""
    if "floor_shared_reads" in row:
        floor += f", shared {number(row['floor_shared_reads'])} ({row['percent_of_floor_shared_reads']:.0f}%)"
    goal = f"{number(row['goal'])} {'met' if row['goal_met'] else 'missed'}" if "goal" in row else ""
    beside = ["", ""] if peer is None else [f"{number(peer)} ({whose})", f"{times_better(row, peer):.2f}x"]
    if "times_plain" in row:
        beside = ["", f"{row['times_plain']:.2f}x plain decoding; a step takes {row['step_ratio']:.2f} times as long"]
    return [f"{row['workload']} {row['model']}", value, floor, goal, *beside]


def times_better(row: Table, peer: float) -> float:
    """Of a workload: 2 for twice the rate or half the time."""
    return peer / row["value"] if row["kind"] in ("latency", "start") else row["value"] / peer


def kernels(report: Table, groups: Sequence[str]) -> str:
    parts = []
    for group in groups:
        rows = [_kernel(case) for case in report["cases"] if case["group"] == group]
        if rows:
            head = ["case", "us", "floor", "error", "torch, same run", f"best peer, {LISTED['date']}", "times faster"]
            parts.append(f"{group}: {GROUPS[group].lower()}\n\n{markdown(head, rows)}")
    return "\n\n".join(parts)


def _kernel(case: Table) -> list[str]:
    if "failed" in case:
        return [case["case"], "failed", "", case["failed"], "", "", ""]
    torch = number(case["torch_us"]) if "torch_us" in case else ""
    values = [f"**{number(case['us'])}**", f"{case['percent']:.0f}%", f"{case['error']:.1e}"]
    return [case["case"], *values, torch, *_beside(*best_listed(case), case["us"])]


def _beside(peer: str, us: float, ours: float) -> list[str]:
    return [f"{peer} {number(us)}", f"{us / ours:.2f}x"] if us else ["", ""]


def attention(report: Table) -> str:
    head = ["case", "us", "floor", "error", "torch, same run", f"best peer, {LISTED['date']}", "times faster"]
    rows = []
    for case in report["rows"]:
        name = f"{case['case']} {case['precision']}"
        if "failed" in case:
            rows.append([name, "failed", "", case["failed"], "", "", ""])
            continue
        torch = f"{case['torch']} {number(case['torch_us'])}" if "torch_us" in case else ""
        best = case.get("listed_best", "")
        beside = _beside(best, case["listed_us"][best] if best else 0.0, case["us"])
        values = [f"**{number(case['us'])}**", f"{case['percent']:.0f}%", f"{case['error']:.1e}"]
        rows.append([name, *values, torch, *beside])
    return markdown(head, rows)


def host(report: Table) -> str:
    """Milliseconds of the host for a step of decodes."""
    parts = {"plan": "schedule", "build": "build", "take in": "update", "report": "report", "all": "all"}
    rows = [
        [f"{row['running']}, {row['outputs']} outputs", *(f"{row['ms'][key]:.2f}" for key in parts.values())]
        for row in report["steps"]
    ]
    return markdown(["decodes", *parts], rows)


def chat_turn(report: Table) -> str:
    """Milliseconds of the host for the next turn of a chat."""
    parts = {"template": "render", "the whole text": "whole", "what is new of it": "tokenize", "engine": "engine"}
    turns = report["chat_turns"]
    rows = [[f"{row['tokens']:,}", *(f"{row['ms'][key]:.2f}" for key in parts.values())] for row in turns]
    return markdown(["tokens of the chat", *parts], rows)


def cpu(report: Table) -> str:
    """Tokens a second without a GPU, beside transformers, and the ratios of turns that followed each other."""
    head = ["dtype, threads", "one request", "transformers", "ratio", "8 at once", "transformers", "ratio"]
    rows = []
    for row in report["decoding"]:
        cells = [f"{row['dtype']}, {row['threads']}"]
        for batch in ("alone", "batch"):
            rates = [row[f"{name}_{batch}"]["wall"]["median"] for name in ("ours", "transformers")]
            cells += [*(f"{rate:.1f}" for rate in rates), f"{row[f'ratio_{batch}']['wall']:.2f}"]
        rows.append([*cells, f"{row['ratio_of_alone']['wall']:.1f}"])
    return f"{report['model']}; {report['load']}.\n\n" + markdown([*head, "ratio to one after the other"], rows)


def decoding(report: Table) -> str:
    """Grammars and beam search beside plain decoding, and what a step of the host's takes in xgrammar."""
    head = [
        "row",
        "model",
        "mode",
        "ms/token",
        "times plain",
        "steps",
        "forced",
        "fill, ms a step",
        "accept, ms a step",
    ]
    rows = []
    for row in report["comparisons"]:
        for mode, found in row.get("modes", {}).items():
            numbers = [number(found["value"]), f"{found['times_plain']:.2f}", f"{found['steps']:.0f}"]
            numbers.append(f"{found.get('forced', 0):.0%}")
            spent = [number(found[f"{name}_ms"]) if found["fill_ms"] else "" for name in ("fill", "accept")]
            rows.append([row["row"], row["model"], mode, *numbers, *spent])
        if "failed" in row:
            rows.append([row["row"], row["model"], f"failed: {row['failed']}", "", "", "", "", "", ""])
    return markdown(head, rows)


def swap(report: Table) -> str:
    """Copies of blocks to the host's memory and back beside a plain copy, and prompts that come back."""
    link = report["link"]
    text = f"One plain copy: {link['store_gb_per_s']:.1f} GB/s to the host, {link['load_gb_per_s']:.1f} GB/s back."
    rows = []
    for row in report["copies"]:
        cells = [f"{row['layout']}, {row['blocks']}{', shuffled' if row['shuffled'] else ''}"]
        for kind in ("store", "load"):
            direct = row.get(f"direct_{kind}_gb_per_s")
            cells += [f"{row[f'{kind}_gb_per_s']:.1f}", f"{row[f'{kind}_percent_of_link']:.0f}%"]
            cells += [f"{row[f'{kind}_issue_ms']:.2f}", f"{direct:.1f}" if direct else ""]
        rows.append(cells)
    each = ["GB/s", "of a plain copy", "host, ms", "by a kernel, GB/s"]
    copies = markdown(["blocks", *(f"{kind}: {name}" for kind in ("store", "load") for name in each)], rows)
    head = ["prompt", "GB", "loaded, ms", "computed, ms", "beside 8 decodes: loaded", "longest step", "computed"]
    back = [
        [
            f"{row['model']}, {row['prompt']} tokens",
            f"{row['bytes'] / 1e9:.2f}",
            *(number(row[f"{name}_ms"]) for name in ("load", "compute", "load_beside_8")),
            *(number(row[f"{name}_ms"]) for name in ("load_beside_8_longest_step", "compute_beside_8")),
            number(row["compute_beside_8_longest_step_ms"]),
        ]
        for row in report["returns"]
    ]
    return "\n\n".join([text, copies, *([markdown([*head, "longest step"], back)] if back else [])])


def kv_link(report: Table) -> str:
    """Blocks from GPU to GPU beside one plain copy."""
    link = report["link"]
    text = f"Blocks of {report['layers']} layers of {report['layout']}. One plain copy: {link['gb_per_s']:.1f} GB/s."
    rows = [
        [
            f"{row['tokens']} tokens{', shuffled' if row['shuffled'] else ''}",
            f"{row['blocks'] * row['block_bytes'] / 1e6:.1f}",
            number(row["ms"]),
            f"{row['gb_per_s']:.1f}",
            f"{row['percent_of_link']:.0f}%",
        ]
        for row in report["loads"]
    ]
    return f"{text}\n\n{markdown(['load', 'MB', 'ms', 'GB/s', 'of a plain copy'], rows)}"


def kv_layers(report: Table) -> str:
    """How long behind a prompt's step its blocks are in the host's memory, with and without streaming."""
    found = {(row["model"], row["prompt"], row["kind"]): row for row in report["leaves"]}
    head = [
        "prompt",
        "GB",
        "plain copy, ms",
        "first token, ms",
        "then stored, ms",
        "behind: first token",
        "then stored",
    ]
    rows = []
    for (model, prompt, kind), row in found.items():
        if kind == "streamed":
            behind = found[model, prompt, "behind"]
            times = [one[name] for one in (row, behind) for name in ("prompt_ms", "stored_ms")]
            name = f"{model}, {prompt} tokens{', captured' if row['captured'] else ''}"
            rows.append([name, f"{row['bytes'] / 1e9:.2f}", *map(number, (row["copy_ms"], *times))])
    return markdown(head, rows)


def kv_found(report: Table) -> str:
    """A prefix that another engine has computed, beside computing it and beside having it."""
    text = f"{report['model']}'s shape. First token behind the prefix and {report['new_tokens']} more tokens."
    head = ["prefix", "GB", "found, ms", "computed, ms", "computed / found", "cached, ms", "loads, ms", "GB/s"]
    rows = [
        [
            f"{row['connector']}, {row['tokens']:,} tokens",
            f"{row['bytes'] / 1e9:.2f}",
            *map(number, (row["found_ms"], row["computed_ms"])),
            f"{row['times']:.2f}x",
            *map(number, (row["cached_ms"], row["load_ms"])),
            f"{row['gb_per_s']:.1f}",
        ]
        for row in report["found"]
    ]
    return f"{text}\n\n{markdown(head, rows)}"


def nano(report: Table) -> str:
    """The 300-line engine beside the whole one."""
    head = ["workload", "output tok/s", "of LLM's", "start, s"]
    whole = report["nano"][0]["value"]
    rows = []
    for row in report["nano"]:
        name = f"{report['workload']} {report['model']}, {row['engine']}"
        share, start = f"{row['value'] / whole:.0%}", number(row["start_seconds"])
        rows.append([name, f"**{number(row['value'])}**", share, start])
    return markdown(head, rows)


def serving(report: Table) -> str:
    """A server under load: times of streams in milliseconds, and its throughput beside that of the engine alone."""
    head = ["load", "first token: p50", "p99", "between tokens: p50", "p99", "output tokens/s", "of the engine alone"]
    rows = []
    for row in report["load"]:
        times = [row[f"{name}_ms"]["percentiles"] for name in ("time_to_first_token", "inter_token_latency")]
        cells = [number(percentiles[at]) for percentiles in times for at in ("50", "99")]
        alone = "" if row["of_offline"] is None else f"{row['of_offline']:.0%}"
        alone = f"{row['of_one']:.2f} times one engine's" if "of_one" in row else alone
        rows.append([f"{row['model']}, {row['scenario']}", *cells, number(row["output_tokens_per_second"]), alone])
    faults = [[row["fault"], "held" if row["passed"] else row["why"], _seconds(row)] for row in report["faults"]]
    parts = [markdown(head, rows)] if rows else []
    return "\n\n".join([*parts, *([markdown(["fault", "what must hold after it", "s"], faults)] if faults else [])])


def _seconds(row: Table) -> str:
    return f"{row['seconds']:.1f}" if "seconds" in row else ""


def routing(report: Table) -> str:
    """What clients see with and without the router, in milliseconds, and the router's processor time."""
    head = ["what", "at once", "unit", "direct: p50", "p99", "routed: p50", "p99", "router's processor, us each"]
    rows = []
    for row in report["routing"]:
        times = [f"{row[way][at]:.2f}" for way in ("direct", "routed") for at in ("p50", "p99")]
        rows.append([row["what"], str(row["at_once"]), row["unit"], *times, f"{row['cpu_us']:.0f}"])
    return f"In turns; {report['load']}.\n\n" + markdown(head, rows)


def grammars(report: Table) -> str:
    """Packages that make masks of JSON schemas, beside each other."""
    head = ["schema", "tokens", "package", "first mask, ms", "others, us", "slowest, us", "forced", "forced, compact"]
    rows = []
    for row in report["grammars"]:
        numbers = [f"{row['first_ms']:.2f}", f"{row['fill_us']:.1f}", f"{row['slowest_us']:.0f}"]
        forced = [f"{row['forced']:.0f}", f"{row['forced_compact']:.0f}"]
        rows.append([row["case"], str(row["tokens"]), row["package"], *numbers, *forced])
    return f"A vocabulary of {report['vocabulary']} tokens, one thread.\n\n" + markdown(head, rows)


def accuracy(report: Table) -> str:
    """What narrow weights and a narrow cache change in logits and perplexity."""
    head = ["model and format", "logit error", "KL, nats", "largest", "same most likely token", "perplexity"]
    rows = []
    for row in report["accuracy"]:
        group = f", groups of {row['group_size']}" if "group_size" in row else ""
        numbers = [f"{row['logit_error']:.4f}", f"{row['kl']:.5f}", f"{row['kl_max']:.3f}", f"{row['agreement']:.1%}"]
        rows.append([f"{row['model']}, {row['format']}{group}", *numbers, f"{row['perplexity']:.3f}"])
    texts = {f"{row['model']} reads {row['tokens']} tokens of {row['text']}" for row in report["accuracy"]}
    dtypes = sorted({row["dtype"] for row in report["accuracy"] if row.get("dtype", row["format"]) != row["format"]})
    computed = f" Formats are computed in {' and '.join(dtypes)}." if dtypes else ""
    return f"{'; '.join(sorted(texts))}.{computed}\n\n" + markdown(head, rows)


def parity(report: Table) -> str:
    """Model outputs beside transformers': how many comparisons, and the largest error of each kind."""
    kinds: dict[str, list[Table]] = {}
    for row in report["measured"]:
        kinds.setdefault(row["test"].split("::")[1].split("[")[0], []).append(row)
    rows = []
    for name, found in kinds.items():
        numbers = {key: 0.0 for row in found for key, value in row.items() if isinstance(value, float)}
        for row in found:
            numbers = {key: max(most, abs(row.get(key, 0.0))) for key, most in numbers.items()}
        largest = ", ".join(f"{key.replace('_', ' ')} {value:.2g}" for key, value in numbers.items())
        rows.append([name, str(len(found)), str(sum(row["outcome"] == "passed" for row in found)), largest])
    return markdown(["test", "models", "passed", "largest"], rows)


def table(report: Table, groups: Sequence[str]) -> str:
    """Any of the reports as Markdown.

    Raises:
        ValueError: not a report of these benchmarks.
    """
    kind = kind_of(report)
    simple = {
        "engine": engine,
        "attention": attention,
        "host": host,
        "chat-turn": chat_turn,
        "cpu": cpu,
        "parity": parity,
        "decoding": decoding,
        "swap": swap,
        "kv-link": kv_link,
        "kv-layers": kv_layers,
        "prefill-decode": prefill_decode,
        "kv-found": kv_found,
        "grammars": grammars,
        "accuracy": accuracy,
        "serving": serving,
        "nano": nano,
        "cluster": cluster,
    }
    if kind == "timeline":
        body = "\n\n".join(map(timeline.text, report["timelines"]))
    elif kind == "kernels":
        body = kernels(report, groups)
    elif kind in simple:
        body = simple[kind](report)
    else:
        raise ValueError("not the results of bench.engine, bench.kernels, bench.timeline or another benchmark")
    return f"{facts(report)}\n\n{body}"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.tables", description="Print results as Markdown.")
    parser.add_argument("results", type=Path, help="what a benchmark wrote")
    parser.add_argument("--only", default=",".join(GROUPS), metavar="K3,K4", help="groups of bench.kernels (all)")
    args = parser.parse_args(argv)
    try:
        print(table(json.loads(args.results.read_text()), args.only.split(",")))
    except ValueError as error:
        print(f"{args.results}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
