"""Nothing that a request asks for may stop the device: every size of vocabulary, every set of limits, every dtype."""

import subprocess
import sys

import pytest
from support.checkout import environment

PARTS = 16


@pytest.mark.gpu
@pytest.mark.timeout(600)
def test_every_launch_ends(tmp_path, record_property):
    """In processes of their own, since a kernel that hangs cannot be stopped otherwise."""
    logs = [tmp_path / f"part{part}.log" for part in range(PARTS)]
    running = []
    for part, log in enumerate(logs):
        command = [sys.executable, "-m", "support.sampling_sweep", str(part), str(PARTS)]
        with log.open("w") as out:
            running.append(subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env=environment()))
    try:
        codes = [process.wait(timeout=540) for process in running]
    finally:
        for process in running:
            process.kill()
    texts = [log.read_text().splitlines() for log in logs]
    failed = ["\n".join(text[-25:]) for code, text in zip(codes, texts, strict=True) if code != 0]
    assert not failed, "\n\n".join(failed)
    cases = sum(int(text[-1].removeprefix("done: ").removesuffix(" cases")) for text in texts)
    record_property("cases", cases)
    assert cases > 1300
