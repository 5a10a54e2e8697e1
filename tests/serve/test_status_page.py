"""The page at ``/``: its script, in node, reads what ``/metrics`` says."""

import json
import re
import shutil
import subprocess

import pytest
from support.server import MODEL, ROOT, eventually

PAGE = (ROOT / "tritonllm" / "serve" / "status.html").read_text()
NAMES = sorted(set(re.findall(r'"((?:vllm|tritonllm):\w+)"', PAGE)))
(SCRIPT,) = re.findall(r"<script>(.*)</script>", PAGE, re.DOTALL)
ASK = {"model": MODEL, "prompt": "There was a fox named", "max_tokens": 30, "ignore_eos": True, "stream": True}


def test_it_is_one_file_that_asks_nobody_else(server):
    response = server.client.get("/")
    assert response.status_code == 200
    assert response.headers["content-type"].startswith("text/html")
    assert response.text == PAGE
    assert "connect-src 'self'" in response.headers["content-security-policy"]
    assert not re.findall(r"https?://|src=|href=", PAGE)


def test_the_metrics_that_it_reads_are_there(server):
    assert server.client.post("/v1/completions", json=ASK).status_code == 200
    text = server.client.get("/metrics").text
    assert len(NAMES) >= 10
    assert [name for name in NAMES if name not in text] == []


def test_ids_that_the_script_fills_in_are_there():
    filled = set(re.findall(r'(?:show|draw|latency|\$)\("([\w-]+)"', SCRIPT))
    filled |= {f"{name}-line" for name in re.findall(r'draw\("(\w+)"', SCRIPT)}
    filled |= {f"{name}-more" for name in re.findall(r'latency\("(\w+)"', SCRIPT)}
    assert filled <= set(re.findall(r'id="([\w-]+)"', PAGE))


@pytest.mark.skipif(shutil.which("node") is None, reason="needs node")
def test_what_it_shows_of_a_request(server):
    before = server.client.get("/metrics").text
    assert server.client.post("/v1/completions", json=ASK).status_code == 200
    eventually(server.is_idle)
    after = server.client.get("/metrics").text
    program = f"{SCRIPT}\nconst [a, b] = {json.dumps([before, after])}.map(parse);\n"
    program += "console.log(JSON.stringify({...view(b, a, a, 2), model: b.model}))"
    done = subprocess.run(["node", "-"], input=program, capture_output=True, text=True, check=True)
    seen = json.loads(done.stdout)
    assert (seen["model"], seen["tokens"], seen["running"], seen["waiting"]) == (MODEL, 15, 0, 0)
    assert 0 < seen["ttft"][0] <= seen["ttft"][1] and 0 < seen["itl"][0] <= seen["itl"][1]
    assert 0 <= seen["hits"] <= 1 and seen["cache"] == 0
