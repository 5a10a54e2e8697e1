"""The page at ``/``: its script, in node, reads what ``/metrics`` says."""

import asyncio
import json
import re
import shutil
import subprocess

import pytest
from support.server import MODEL, ROOT, eventually
from support.streams import Stream
from support.waiting import PATIENCE

from tritonllm.serve.api import status_api
from tritonllm.serve.api.errors import APIError
from tritonllm.serve.api.status_api import ActivityQuestions
from tritonllm.telemetry.snapshot import View

PAGE = (ROOT / "tritonllm" / "serve" / "api" / "status.html").read_text()
NAMES = sorted(set(re.findall(r'"((?:vllm|tritonllm):\w+)"', PAGE)))
(SCRIPT,) = re.findall(r"<script>(.*)</script>", PAGE, re.DOTALL)
(ACTIVITY,) = re.findall(r'const ACTIVITY = "(.*)";', SCRIPT)
ASK = {"model": MODEL, "prompt": "There was a fox named", "max_tokens": 30, "ignore_eos": True, "stream": True}


def test_it_is_one_file_that_asks_nobody_else(server):
    response = server.client.get("/")
    assert response.status_code == 200
    assert response.headers["content-type"].startswith("text/html")
    assert response.text == PAGE
    assert "connect-src 'self'" in response.headers["content-security-policy"]
    assert not re.findall(r"https?://|src=|href=(?!\"data:,\")", PAGE)


def test_probes_and_the_load(server):
    assert [server.client.request(how, "/ping").json() for how in ("GET", "POST")] == [{"status": "ok"}] * 2
    eventually(lambda: server.client.get("/load").json() == {"server_load": 0})
    stream = Stream(server, max_tokens=1500)
    eventually(lambda: server.client.get("/load").json() == {"server_load": 1})
    stream.end()
    eventually(lambda: server.client.get("/load").json() == {"server_load": 0})


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


def test_what_it_asks_says_what_runs_and_who_holds_which_block(server):
    def told():
        return server.client.get(f"/{ACTIVITY}").json()

    eventually(server.is_idle)
    before = told()
    assert [before["counters"][name] for name in ("running", "waiting", "used_blocks")] == [0, 0, 0]
    cells, blocks = before["cells"], before["counters"]["num_blocks"]
    assert len(cells["kinds"]) == -(-blocks // cells["blocks_per_cell"]) <= 1024
    assert set(cells["kinds"]) <= {".", "c"} and set(cells["owners"]) == {-1}
    stream = Stream(server, max_tokens=1500)
    looks = []

    def decodes():
        looks.append(told())
        return any(one["state"] == "decode" and one["output_tokens"] for one in looks[-1]["requests"])

    eventually(decodes)
    now = looks[-1]
    (one,) = [one for one in now["requests"] if one["state"] == "decode"]
    assert one["prompt_tokens"] == len(server.client.post("/tokenize", json={"prompt": ASK["prompt"]}).json()["tokens"])
    assert 0 < one["output_tokens"] <= 1500 and one["blocks"] >= one["computed_tokens"] / 16
    assert now["counters"]["used_blocks"] == one["blocks"]
    assert set(now["cells"]["owners"]) <= {-1, one["number"]}
    assert stream.end()[-1] == "[DONE]"


class Engine:
    """Answers late, or never."""

    def __init__(self, takes):
        self.takes, self.asked = takes, []

    async def activity(self, view, replica):
        self.asked.append((view["rows"], replica))
        await asyncio.sleep(self.takes)
        return {"number": len(self.asked)}


def test_many_who_look_cost_the_engine_one_answer(monkeypatch):
    monkeypatch.setattr(status_api, "ANSWERS_WITHIN", PATIENCE)
    engine = Engine(0.05)

    async def look():
        looks = ActivityQuestions(engine)
        return await asyncio.gather(*[looks.get(View(rows=rows), 0) for rows in (20, 30) for _ in range(50)])

    assert asyncio.run(look()) == [{"number": 1}] * 50 + [{"number": 2}] * 50
    assert engine.asked == [(20, 0), (30, 0)]


def test_an_engine_that_hangs_is_an_error_and_not_a_wait(monkeypatch):
    monkeypatch.setattr(status_api, "ANSWERS_WITHIN", 0.05)

    async def look():
        looks = ActivityQuestions(Engine(3600))
        for _ in range(2):
            with pytest.raises(APIError, match="the engine has not answered for"):
                await looks.get(View())

    asyncio.run(look())


@pytest.mark.skipif(shutil.which("node") is None, reason="needs node")
def test_what_it_shows_of_a_request(server):
    eventually(server.is_idle)
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


@pytest.mark.skipif(shutil.which("node") is None, reason="needs node")
def test_looks_of_another_server_or_another_time_do_not_count():
    program = f"""{SCRIPT}
    const look = (at, steps) => ({{ at, ...parse("tritonllm:steps_total{{model_name=\\"a\\"}} " + steps) }});
    const looks = [look(0, 10), look(50000, 20)];
    const later = [look(60000, 20), look(60001, 25), look(51000, 3)];
    console.log(JSON.stringify(later.map(now => comparable(looks, now).length)))"""
    done = subprocess.run(["node", "-"], input=program, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == [2, 1, 0]


@pytest.mark.skipif(shutil.which("node") is None, reason="needs node")
def test_durations_have_no_exponent():
    program = f"{SCRIPT}\nconsole.log(JSON.stringify([0.01234, 12.34, 999.4, 999.6, 11500, 1234567].map(duration)))"
    done = subprocess.run(["node", "-"], input=program, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == ["0.0123 ms", "12.3 ms", "999 ms", "1.00 s", "11.5 s", "1,235 s"]


@pytest.mark.skipif(shutil.which("node") is None, reason="needs node")
def test_the_cache_of_several_engines_is_in_use_by_its_mean():
    text = "".join(f'vllm:kv_cache_usage_perc{{model_name="a",engine="{i}"}} {0.2 * (i + 2)}\\n' for i in range(2))
    program = f"{SCRIPT}\nconst now = parse('{text}');\nconst seen = view(now, now, now, 1);\n"
    program += "console.log(JSON.stringify([seen.cache.toFixed(3), seen.engines]))"
    done = subprocess.run(["node", "-"], input=program, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == ["0.500", 2]
