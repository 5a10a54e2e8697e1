"""``bench.route``: both ways give the same answers, and the numbers are where the report looks for them."""

import json

import pytest

from bench import route
from bench.reports import kind_of
from bench.tables import routing

pytestmark = pytest.mark.long


@pytest.mark.smoke
def test_writes_results(tmp_path, capsys):
    out = tmp_path / "route.json"
    assert route.main(["--turns", "1", "--count", "10", "--gap", "0.01", "--out", str(out)]) == 0
    written = json.loads(out.read_text())
    assert kind_of(written) == "routing"
    assert {"machine", "commit", "date", "load"} <= set(written)
    assert [(row["what"], row["at_once"]) for row in written["routing"]] == [
        ("requests", 1),
        ("streams", 1),
        ("streams", 32),
    ]
    assert all(set(row[way]) == {"p50", "p99"} for row in written["routing"] for way in ("direct", "routed"))
    assert all(written["routing"][0][way]["p50"] > 0 for way in ("direct", "routed"))  # events may come all at once
    assert len(capsys.readouterr().out.splitlines()) == 3
    assert routing(written).count("\n") == 6


def test_a_mistake_is_named(capsys):
    with pytest.raises(SystemExit):
        route.main(["--turns", "0"])
    assert "--turns must be at least 1" in capsys.readouterr().err
