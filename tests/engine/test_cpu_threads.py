import os

import pytest

from tritonllm.system.cpu_threads import granted_cores, threads_for


@pytest.mark.parametrize(
    ("hidden", "have", "granted", "threads"),
    [(128, 8, 8, 1), (512, 8, 8, 8), (512, 8, 2, 2), (512, 1, 8, 1), (4096, 4, 0, 1)],
)
def test_no_more_threads_than_can_run(hidden, have, granted, threads):
    assert threads_for(hidden, have, granted) == threads


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({}, 64),
        ({"cpu.max": "max 100000\n"}, 64),
        ({"cpu.max": "250000 100000\n"}, 2),
        ({"cpu.max": "50000 100000\n"}, 1),
        ({"cpu.max": "9900000 100000\n"}, 64),
        ({"cpu.max": "something else"}, 64),
        ({"cpu/cpu.cfs_quota_us": "300000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 3),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, 64),
    ],
)
def test_a_containers_quota_counts(files, cores, tmp_path, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)))
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert granted_cores(tmp_path) == cores
