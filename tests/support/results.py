"""`pytest --results FILE`: outcomes by file and the numbers that tests recorded, as JSON with machine and commit."""

import datetime
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from autotune.revision import commit
from bench.runner import machine


class ResultsWriter:
    """A pytest plugin; tests add numbers with the `record_property` fixture."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._outcomes: dict[str, Counter[str]] = {}
        self._measured: list[dict[str, Any]] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        # a failing set-up or teardown counts against its test; a passing one says nothing
        if report.when != "call" and report.passed:
            return
        file = report.nodeid.split("::")[0]
        self._outcomes.setdefault(file, Counter())[report.outcome] += 1
        if report.user_properties:
            self._measured.append({"test": report.nodeid, "outcome": report.outcome, **dict(report.user_properties)})

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if not self._outcomes:
            return
        report = {
            "machine": machine(torch.device("cuda", torch.cuda.current_device())),
            "commit": commit(),
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "outcomes": {file: dict(counts) for file, counts in sorted(self._outcomes.items())},
            "measured": self._measured,
        }
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._path.write_text(json.dumps(report, indent=1) + "\n")
