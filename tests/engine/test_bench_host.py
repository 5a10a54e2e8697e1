"""What the host does for a step, measured without a model."""

import json

import pytest

from bench import host
from tritonllm.config.sampling_params import RequestOutputKind

pytestmark = pytest.mark.long


def test_every_request_decodes_in_every_step():
    engine = host.make_engine(6, host.Clock())
    params = host.SamplingParams(max_tokens=40, ignore_eos=True, output_kind=RequestOutputKind.DELTA)
    for number in range(6):
        engine.add_request(str(number), list(range(1, 30 + number)), params)
    outputs = [output for _ in range(60) for output in engine.step()]
    tokens = [[token for o in outputs if o.request_id == str(n) for token in o.outputs[0].token_ids] for n in range(6)]
    assert tokens == [[5] * 40] * 6
    assert not engine.has_unfinished_requests()


def test_parts_add_up():
    found = host.measure(4, 3, RequestOutputKind.FINAL_ONLY)
    more = {name: found.pop(name) for name in ("listening", "tracing")}
    assert set(found) == {"all", "build", "schedule", "update", "report"}
    assert found["all"] > 0 and min(found.values()) >= 0
    assert set(more) == {"listening", "tracing"}


@pytest.mark.parametrize("watch", [host.listening, host.tracing])
def test_somebody_listens_in_a_stretch_only(watch):
    engine = host.make_engine(3, host.Clock())
    for number in range(3):
        engine.add_request(str(number), [1, 2, 3], host.SamplingParams(max_tokens=40, ignore_eos=True))
    with watch(engine):
        assert engine._events.heard
        host.stretch(engine, 5)
        assert engine._events.heard, "the sink did not fail"
    assert not engine._events.heard


@pytest.mark.smoke
def test_writes_results(tmp_path, capsys):
    assert host.main(["--running", "2,3", "--steps", "2", "--out", str(tmp_path / "host.json")]) == 0
    written = json.loads((tmp_path / "host.json").read_text())
    assert [(row["running"], row["outputs"]) for row in written["steps"]] == [
        *((2, "final_only"), (2, "delta"), (3, "final_only"), (3, "delta"))
    ]
    assert {"cpu", "python", "commit", "date"} <= set(written)
    assert len(capsys.readouterr().out.splitlines()) == 4
    with pytest.raises(SystemExit):
        host.main(["--steps", "0"])
    assert f"--steps must be from 1 to {host.MOST_STEPS}" in capsys.readouterr().err
