"""``tritonllm rebalance-experts``."""

import json

import pytest

from tritonllm.cli import main
from tritonllm.experts.load import ExpertLoad
from tritonllm.experts.placement import ExpertPlacement
from tritonllm.experts.rebalance import rebalance

LOAD = ExpertLoad("SomeMoE", {1: (8, 4, 2, 2), 3: (1, 1, 1, 1)})


@pytest.fixture
def file(tmp_path):
    LOAD.save(tmp_path / "load.json")
    return str(tmp_path / "load.json")


def test_a_placement_and_its_balance(file, tmp_path, capsys):
    out = tmp_path / "placement.json"
    arguments = ["rebalance-experts", file, file, "-tp", "2", "--num-redundant-experts", "2", "-o", str(out)]
    assert main(arguments) == 0
    assert ExpertPlacement.read(out) == rebalance(LOAD + LOAD, 2, 2)
    assert capsys.readouterr().out.splitlines() == [
        "balancedness: the mean load of the ranks by the largest",
        "layer  before  after",
        "    1   0.667  1.000",
        "    3   1.000  1.000",
        "  all   0.714  1.000",
    ]
    assert main([*arguments, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["layers"]["1"] == {"before": pytest.approx(2 / 3), "after": 1.0}
    assert (told["before"], told["after"]) == (pytest.approx(5 / 7), 1.0)


def test_three_ranks_have_no_order_to_compare_with(file, tmp_path, capsys):
    out = str(tmp_path / "placement.json")
    assert main(["rebalance-experts", file, "-tp", "3", "--num-redundant-experts", "2", "-o", out]) == 0
    assert capsys.readouterr().out.splitlines()[2].split()[:2] == ["1", "-"]


def test_wrong_usage(file, tmp_path, capsys):
    out = str(tmp_path / "placement.json")
    with pytest.raises(SystemExit) as end:
        main(["rebalance-experts", file, "-tp", "3", "-o", out])
    assert end.value.code == 2
    assert "take 2, 5 or 8, say" in capsys.readouterr().err
    assert main(["rebalance-experts", str(tmp_path / "nowhere.json"), "-tp", "2", "-o", out]) == 1
    assert "nowhere.json" in capsys.readouterr().err
