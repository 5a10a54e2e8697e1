"""What ``bench.prefill_decode`` measured, as a table, and whether its goal is met."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from bench.reports import markdown, number

Row = Mapping[str, Any]
GOAL = 0.5  # of the shared group's 99th percentile between two tokens
EQUAL = 0.98  # of its output tokens a second count as equal
NAMES = {
    "split": "split",
    "shared": "shared",
    "chunked": "shared, in chunks",
    "routed": "shared, behind a router",
}


def prefill_decode(report: dict[str, Any]) -> str:
    """A row for each rate of long prompts and group, and what they say of the goal."""
    head = ["long prompts/s", "group", "output tokens/s", "of those asked for", "between tokens: p50", "p90", "p99"]
    head += ["longest", "first token, long: p50", "p99", "short: p50", "p99", "failed", "blocks fetched", "missed"]
    rows = sorted(report["prefill_decode"], key=lambda row: (row["long_rate"], list(NAMES).index(row["group"])))
    traffic = report["traffic"]
    text = (
        f"{report['model']} on {report['gpus']} GPUs: {traffic['short_rate']:g} requests/s of "
        f"{traffic['short'][0]} tokens in and {traffic['short'][1]} out, beside prompts of {traffic['long'][0]} tokens "
        f"with {traffic['long'][1]} out. Times are milliseconds."
    )
    return "\n\n".join(
        [text, markdown(head, map(_cells, rows)), "\n".join(f"- {line}" for line in judged(rows))]
    ).rstrip()


def _cells(row: Row) -> list[str]:
    gaps = row["all"]["inter_token_latency_ms"]
    firsts = [row[name]["time_to_first_token_ms"] for name in ("long", "short")]
    cells = [f"{row['long_rate']:g}", _name(row), number(row["output_tokens_per_second"])]
    cells.append(f"{row['output_tokens_per_second'] / row['asked_output_tokens_per_second']:.0%}")
    cells += ["" if gaps is None else number(gaps[at]) for at in ("50", "90", "99", "max")]
    cells += ["" if first is None else number(first[at]) for first in firsts for at in ("50", "99")]
    blocks = [f"{row['blocks'][kind]:.0f}" for kind in ("fetched", "missed")] if row["group"] == "split" else ["", ""]
    return [*cells, str(row["failed_requests"]), *blocks]


def _name(row: Row) -> str:
    settings = ", ".join(f"{name} {value}" for name, value in row["settings"].items())
    return f"{NAMES[row['group']]} ({settings})" if settings else NAMES[row["group"]]


def judged(rows: Sequence[Row]) -> Iterator[str]:
    """A sentence for each comparison of the split group with another one under the same traffic."""
    for split in (row for row in rows if row["group"] == "split"):
        for other in rows:
            gaps = [row["all"]["inter_token_latency_ms"] for row in (split, other)]
            if other["group"] == "split" or other["long_rate"] != split["long_rate"] or None in gaps:
                continue
            time = gaps[0]["99"] / gaps[1]["99"]
            rate = split["output_tokens_per_second"] / other["output_tokens_per_second"]
            met = "met" if time <= GOAL and rate >= EQUAL else "not met"
            yield (
                f"{split['long_rate']:g} long prompts/s, {_name(split)}: p99 between tokens is {time:.2f} times that "
                f"of *{_name(other)}*, at {rate:.2f} times its output tokens/s. The goal, half at equal throughput, "
                f"is {met}."
            )
