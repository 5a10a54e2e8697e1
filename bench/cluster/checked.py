"""The simulated replica beside the measured one: the same requests, and what came of them."""

import json
from pathlib import Path
from typing import Any

from bench.cluster.simulation import Cluster, Simulation
from bench.cluster.step_times import MODEL, StepTimes
from bench.cluster.traffic import single
from bench.engine_workloads import WORKLOADS, requests
from bench.reports import RESULTS
from bench.serve_load import SCENARIOS

LONG = 1e6  # seconds; everything counts


def _row(load: str, unit: str, measured: float, simulated: float) -> dict[str, Any]:
    return {"load": load, "unit": unit, "measured": measured, "simulated": simulated, "ratio": simulated / measured}


def compared(times: StepTimes, folder: Path = RESULTS) -> list[dict[str, Any]]:
    """Rows of measured and simulated figures.

    Constants were solved from the median to the first token at 8 requests/s and the 90th percentile between tokens at
    16; everything else here is a prediction.
    """
    batch = requests(WORKLOADS["W2"])
    chats = single([0.0] * len(batch), [len(r.prompt) for r in batch], [r.max_tokens for r in batch])
    simulation = Simulation(Cluster(gpus=1), chats, times, warm_up=0.0, seconds=LONG)
    simulation.run()
    seconds = simulation.replicas[0].busy
    engine = json.loads((folder / "engine-h200.json").read_text())["rows"]
    value = next(row["value"] for row in engine if row["workload"] == "W2")
    rows = [_row("W2, all at once", "output tokens/s", value, sum(r.max_tokens for r in batch) / seconds)]
    served = json.loads((folder / f"serve-{MODEL}-h200.json").read_text())["load"]
    for scenario in (scenario for part in ("llama", "saturation") for scenario in SCENARIOS[part]):
        found = next(row for row in served if row["scenario"] == scenario.name)
        asks = scenario.asks()[: found["num_requests"]]
        chats = single([a.at for a in asks], [scenario.input_len] * len(asks), [scenario.output_len] * len(asks))
        simulation = Simulation(Cluster(gpus=1), chats, times, warm_up=0.0, seconds=LONG)
        ours = simulation.run()
        for name, ours_name in (("time_to_first_token", "first_token"), ("inter_token_latency", "between_tokens")):
            for percent in (50, 99):
                measured = found[f"{name}_ms"]["percentiles"][str(percent)]
                label = f"ms {'to the first token' if ours_name == 'first_token' else 'between tokens'}, p{percent}"
                rows.append(_row(scenario.name, label, measured, ours[f"{ours_name}_ms"][f"p{percent}"]))
    return rows
