"""``bench.prefill_decode``: what it sends, what it counts, how its groups are started, and a rehearsal on the CPU."""

import json
import tomllib
from dataclasses import replace

import pytest

from bench import prefill_decode
from bench.prefill_decode import REHEARSED, Report, Traffic, numbers, why_failed
from bench.prefill_decode_groups import Setup, parts_of, router_config
from bench.prefill_decode_table import judged
from bench.reports import kind_of
from bench.tables import table
from tritonllm.cli.bench_serve import PlannedRequest, Told

pytestmark = pytest.mark.long

TRAFFIC = Traffic(short_rate=40.0, long_rate=4.0, short=(128, 256), long=(8192, 128), warm_up=5.0, window=45.0)
SETUP = Setup(("0", "1", "2", "3"), "CudaIpc", 8.0, 4.0, 256, 512)


@pytest.mark.smoke
def test_each_group_gets_the_same_requests():
    asks = TRAFFIC.asks()
    assert asks == TRAFFIC.asks() and asks == sorted(asks, key=lambda ask: ask.at) and asks[-1].at < 50
    kinds = [TRAFFIC.kind(ask) for ask in asks]
    assert kinds.count("short") == pytest.approx(2000, rel=0.1) and kinds.count("long") == pytest.approx(200, rel=0.2)
    others = replace(TRAFFIC, long_rate=1.0).asks()
    assert [ask for ask in others if ask.input_len == 128] == [ask for ask in asks if ask.input_len == 128]
    assert TRAFFIC.blocks == kinds.count("long") * 511


def test_only_the_window_counts():
    traffic = replace(TRAFFIC, warm_up=1.0, window=2.0)
    early = Told(PlannedRequest(0.5, 128, 8), 100.5, [100.75, 101.0, 101.5, 103.5], 8)
    late = Told(PlannedRequest(2.0, 8192, 2), 102.0, [102.25, 102.5], 2)
    failed = Told(PlannedRequest(2.0, 128, 8), 102.0, [102.1], 1, "it broke off")
    found = numbers([early, late, failed], 100.0, traffic)
    assert found["requests"] == 1 and found["time_to_first_token_ms"] == {"50": 250.0, "99": 250.0, "max": 250.0}
    assert found["output_tokens_per_second"] == (2 * 2 + 2) / 2.0  # an event of the first one holds two tokens
    gaps = found["inter_token_latency_ms"]
    assert (gaps["50"], gaps["max"]) == (250.0, 500.0)
    assert numbers([], 0.0, traffic)["inter_token_latency_ms"] is None


def test_groups_take_the_same_gpus():
    def seen(name, setup=SETUP):
        return [part.environment["CUDA_VISIBLE_DEVICES"] for part in parts_of(name, setup)]

    assert seen("split") == seen("routed") == ["0", "1", "2", "3"] and seen("shared") == seen("chunked") == ["0,1,2,3"]
    split = parts_of("split", SETUP)
    assert [part.role for part in split] == ["prefill", "prefill", "", ""]
    transfers = [json.loads(part.options[part.options.index("--kv-transfer-config") + 1]) for part in split]
    assert [one["kv_role"] for one in transfers] == ["kv_producer"] * 2 + ["kv_consumer"] * 2
    assert transfers[0]["kv_connector_extra_config"] == {"host": "127.0.0.1", "max_bytes": 4 << 30}
    assert transfers[3]["kv_connector_extra_config"] == {"peers": ["127.0.0.1"]}
    assert parts_of("chunked", SETUP)[0].options[-2:] == ("--max-num-batched-tokens", "512")
    all_seen = replace(SETUP, sees_all=True, gpus=("4", "6"))
    assert seen("split", all_seen) == ["4,6", "4,6"]
    assert [part.options[:2] for part in parts_of("split", all_seen)] == [("--device", f"cuda:{n}") for n in (0, 1)]
    config = tomllib.loads(router_config(["http://a", "http://b", "http://c", "http://d"], split, 256))
    assert [one.get("role") for one in config["backends"]] == ["prefill", "prefill", None, None]


def row(group, gap=10.0, rate=100.0, fetched=511, failed=0, **more):
    spread = {"50": gap, "90": gap, "99": gap, "max": gap}
    kinds = {kind: {"inter_token_latency_ms": spread, "time_to_first_token_ms": spread} for kind in ("short", "long")}
    found = {"group": group, "settings": SETUP.of_group(group), "long_rate": 1.0, "output_tokens_per_second": rate}
    found |= {"asked_output_tokens_per_second": 100.0, "failed_requests": failed, "errors": ["no"], **kinds}
    blocks = {"saved": 511, "fetched": fetched, "missed": 0, "of_long_prompts": 511}
    return found | {"all": {"inter_token_latency_ms": spread}, "blocks": blocks} | more


def test_the_goal_is_half_the_time_at_equal_throughput():
    shared = row("shared", gap=20.0)
    for split, met in ((row("split"), True), (row("split", gap=11.0), False), (row("split", rate=90.0), False)):
        (line,) = judged([shared, split, row("shared", long_rate=2.0)])
        assert line.endswith("is met." if met else "is not met.") and "(connector CudaIpc, " in line


def test_a_split_that_brings_nothing_has_failed():
    assert why_failed("split", row("split")) is None and why_failed("shared", row("shared", fetched=0)) is None
    assert "no block came" in why_failed("split", row("split", fetched=0))
    assert "3 requests failed, with ['no']" in why_failed("shared", row("shared", failed=3))


def test_a_file_is_continued(tmp_path):
    out, facts = tmp_path / "there" / "rows.json", {"commit": "a", "traffic": {"long": (8192, 128)}}
    report = Report(out, facts)
    for one in (row("split"), row("shared"), row("split", rate=90.0)):
        report.add(one)
    assert [one["group"] for one in Report(out, facts).rows] == ["shared", "split"]
    assert report.rows[1]["output_tokens_per_second"] == 90.0
    with pytest.raises(ValueError, match="rows of another commit: give another name"):
        Report(out, {**facts, "commit": "b"})


def test_a_rehearsal(tmp_path, capsys):
    """Of the group that is more than ``tritonllm serve`` with a size, which test_serve_load.py rehearses."""
    out = tmp_path / "prefill-decode.json"
    assert prefill_decode.main(["--rehearsal", "--groups", "split", "--out", str(out)]) == 0, capsys.readouterr()
    report = json.loads(out.read_text())
    assert kind_of(report) == "prefill-decode" and {"machine", "commit", "date", "gpus"} <= set(report)
    (found,) = report["prefill_decode"]
    assert (found["group"], found["failed_requests"], found["errors"]) == ("split", 0, [])
    kinds = [REHEARSED.kind(ask) for ask in REHEARSED.asks() if ask.at >= REHEARSED.warm_up]
    assert found["all"]["requests"] == len(kinds) and found["long"]["requests"] == kinds.count("long") > 0
    assert found["short"]["time_to_first_token_ms"]["50"] > 0
    assert 0 < found["blocks"]["fetched"] <= found["blocks"]["of_long_prompts"] == REHEARSED.blocks
    assert found["settings"]["connector"] == "Peer"
    assert table(report, ()).count("\n|") == 2 + 1


def test_a_mistake_is_wrong_usage(capsys):
    for options, message in (
        (["--gpus", "0,1,2"], "an even number"),
        (["--groups", "split,others"], "got 'others'"),
        (["--long", "8192"], "two lengths each"),
        (["--long-rates", "1,x"], "--long-rates must be numbers"),
        (["--window", "0"], "--window must be greater than 0"),
        (["--long-rates", "0"], "--long-rates must be greater than 0"),
    ):
        with pytest.raises(SystemExit):
            prefill_decode.main(options)
        assert message in capsys.readouterr().err
