"""The page at ``/`` in a browser: what people see of a server at work, asleep, locked and gone."""

import re
import shutil
from signal import SIGCONT, SIGSTOP

import pytest
from support import browser as browsers
from support.server import MODEL, ROOT, eventually, running_server
from support.streams import Stream

FOUND = browsers.find()
SEATS = 8
PREFIX = "There was a fox who lived in a wood by a river, and each day she went to the market to buy a fish. "
HITS, QUERIES = "vllm:prefix_cache_hits_total", "vllm:prefix_cache_queries_total"
pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(FOUND is None, reason="no Chromium: scripts/chromium.sh installs one"),
]
# The lowest contrast between a text and what is behind it, by WCAG 2, and the smallest text, of what can be seen.
READABLE = """(() => {
  const channels = colour => colour.match(/[\\d.]+/g).slice(0, 3).map(v => v / 255)
    .map(v => v <= .04045 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4);
  const light = colour => channels(colour).reduce((sum, v, i) => sum + v * [.2126, .7152, .0722][i], 0);
  const behind = one => {
    for (; one; one = one.parentElement) {
      const colour = getComputedStyle(one).backgroundColor;
      if (colour !== "rgba(0, 0, 0, 0)") return colour;
    }
  };
  const texts = [...document.querySelectorAll("body *")].filter(one => one.offsetParent && !one.closest("form") &&
    [...one.childNodes].some(node => node.nodeType === 3 && node.textContent.trim()));
  const contrasts = texts.map(one => {
    const [a, b] = [light(getComputedStyle(one).color), light(behind(one))];
    return (Math.max(a, b) + .05) / (Math.min(a, b) + .05);
  });
  return { count: texts.length, contrast: Math.min(...contrasts), back: light(behind(document.body)),
    size: Math.min(...texts.map(one => parseFloat(getComputedStyle(one).fontSize))) };
})()"""
# How many rows of pixels the line of tokens a second touches.
ROWS = """(canvas => {
  const pixels = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
  const rows = [...pixels].flatMap((v, i) => v && i % 4 === 3 ? [Math.floor(i / 4 / canvas.width)] : []);
  return new Set(rows).size;
})(document.getElementById("tokens-line"))"""
# Of one look: a bar's title for each request, and how many blocks of the map each owner has.
DETAILS = """(() => {
  const owners = {};
  for (const cell of document.querySelectorAll("#map i")) {
    owners[cell.dataset.owner] = (owners[cell.dataset.owner] || 0) + 1;
  }
  return { bars: [...document.querySelectorAll("#batch i")].map(bar => [bar.dataset.number, bar.title]), owners };
})()"""


@pytest.fixture(scope="module")
def watched():
    """A pool of fewer blocks than the map has cells, so that it shows each."""
    options = ("--max-num-seqs", str(SEATS), "--num-blocks", "320", "--server-dev-mode", "--enable-sleep-mode")
    with running_server(*options) as running:
        yield running


@pytest.fixture
def page(tmp_path):
    with browsers.browser(FOUND, tmp_path / "profile") as opened:
        opened.size(1100, 1000)
        yield opened


def numbers(text):
    """Those in a text, in order."""
    return [float(number.replace(",", "")) for number in re.findall(r"\d[\d,]*\.?\d*", text)]


def load(server, count):
    """Streams of different prompts and lengths, half of them with a common beginning."""
    prompts = [(PREFIX * 3 if i % 2 else "") + f"{i} + {i} = " for i in range(count)]
    return [
        Stream(server, wait=False, prompt=prompt, max_tokens=200 + 50 * (i * 7 % 5)) for i, prompt in enumerate(prompts)
    ]


@pytest.mark.smoke
def test_what_it_shows_is_what_the_server_does(watched, page, tmp_path, request):
    page.open(watched.url)
    eventually(lambda: page.text("state").startswith("serving"))
    eventually(lambda: page.text("load") == "0 + 0")
    assert page.text("model") == MODEL
    count = 3 * SEATS if request.config.getoption("--update-screenshots") else SEATS + 4
    streams = load(watched, count)
    eventually(lambda: page.text("load") == f"{SEATS} + {count - SEATS}")
    eventually(lambda: len(page.run(DETAILS)["bars"]) == SEATS and numbers(page.text("tokens"))[0] > 0)
    seen, told = page.run(DETAILS), watched.client.get("/activity?cells=1024").json()
    known = {tokens_of(watched, stream) for stream in streams}
    for number, title in seen["bars"]:
        prompt, cached, output, blocks = numbers(title)
        assert prompt in known and cached <= prompt and output > 0 and blocks >= (prompt + output - 1) / 16
        own = seen["owners"].get(number, 0)
        assert own + seen["owners"].get("s", 0) >= blocks >= own > 0
    assert sum(seen["owners"].values()) == told["counters"]["num_blocks"] == numbers(page.text("cache-more"))[1]
    assert told["cells"]["blocks_per_cell"] == 1
    assert f"{SEATS} continue their texts, 0 compute their prompts" in page.text("batch-more")
    eventually(lambda: numbers(page.text("state"))[0] >= count - SEATS - 2)
    assert page.run(ROWS) > 10
    screenshot(page, tmp_path, request)
    for stream in streams:
        assert stream.end()[-1] == "[DONE]"
    eventually(lambda: page.text("load") == "0 + 0" and page.text("cache") == "0.0 %" and page.text("tokens") == "0")
    assert set(page.run(DETAILS)["owners"]) <= {".", "c"} and page.text("batch-more") == "nothing runs"
    generated = watched.metric("vllm:generation_tokens_total")
    assert numbers(page.text("tokens-more"))[0] == generated >= count * 200
    assert numbers(page.text("state"))[0] == watched.metric("vllm:request_success_total")
    assert page.errors() == []
    asked = {url.removeprefix(watched.url) for url in page.asked(watched.url)}
    assert {url.partition("?")[0] for url in asked} - {"data:,"} == {"/", "/metrics", "/ready", "/activity"}


def test_prefix_hits_are_of_what_was_asked_since_the_page_was_opened(watched, page):
    page.open(watched.url)
    eventually(lambda: page.text("load") == "0 + 0")
    hits, queries = watched.metric(HITS), watched.metric(QUERIES)
    for number in range(3):
        Stream(watched, prompt=f"{number}: {PREFIX * 3}", max_tokens=4).end()
        Stream(watched, prompt=f"{number}: {PREFIX * 3}", max_tokens=4).end()
    hits, queries = watched.metric(HITS) - hits, watched.metric(QUERIES) - queries
    assert hits > 0
    eventually(lambda: page.text("hits") == f"{100 * hits / queries:.0f} %")


def tokens_of(server, stream):
    return len(server.client.post("/tokenize", json={"prompt": stream.prompt}).json()["tokens"])


def screenshot(page, tmp_path, request):
    """In the docs if that is asked for, else where nobody minds."""
    page.size(1100, 100)
    page.size(1100, page.run("document.documentElement.scrollHeight"))
    target = tmp_path / "status.png"
    page.driver.save_screenshot(str(target))
    assert 5_000 < target.stat().st_size < 200_000
    if request.config.getoption("--update-screenshots"):
        shutil.copy(target, ROOT / "docs" / "img" / "status.png")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_can_be_read_on_a_phone(watched, page, scheme):
    page.size(400, 800)
    page.prefer(scheme)
    page.open(watched.url)
    eventually(lambda: page.run(DETAILS)["owners"])
    found = page.run(READABLE)
    assert found["count"] > 15 and found["contrast"] >= 4.5 and found["size"] >= 12
    assert (found["back"] > 0.5) == (scheme == "light")
    assert page.run("document.documentElement.scrollWidth <= document.documentElement.clientWidth")
    beyond = '[...document.querySelectorAll("body *")].filter(one => one.getBoundingClientRect().right > 400).length'
    assert page.run(beyond) == 0


def test_an_engine_that_sleeps(watched, page):
    page.open(watched.url)
    eventually(lambda: page.text("state").startswith("serving"))
    assert watched.client.post("/sleep").status_code == 200
    eventually(lambda: page.text("state") == "takes no requests: the engine sleeps, or has no weights")
    assert page.run('document.getElementById("state").className') == "bad"
    assert watched.client.post("/wake_up").status_code == 200
    eventually(lambda: page.text("state").startswith("serving"))


def test_it_asks_for_the_key(page):
    with running_server(environment={"TRITONLLM_API_KEY": "open sesame"}) as server:
        assert server.client.get("/activity").status_code == 401
        page.open(server.url)
        hidden = "document.getElementById(arguments[0]).hidden"
        eventually(lambda: not page.run(hidden, "key"))
        eventually(lambda: page.text("load") == "0 + 0")
        assert page.run(hidden, "map-card") and page.run(hidden, "batch-card")
        enter(page, "wrong")
        eventually(lambda: page.text("key-more") == "this key does not fit")
        enter(page, "open sesame")
        eventually(lambda: page.run(hidden, "key") and page.run(DETAILS)["owners"])
        page.driver.refresh()
        eventually(lambda: page.run(DETAILS)["owners"])
        assert page.run(hidden, "key"), "the tab remembers it"


def enter(page, key):
    field = page.driver.find_element("id", "secret")
    field.clear()
    field.send_keys(key, "\n")


def test_a_server_that_goes_and_comes_back(page, free_port):
    port, gone = str(free_port), "the server has not answered for"
    with running_server("--port", port) as server:
        assert Stream(server, max_tokens=20).end()[-1] == "[DONE]"
        page.open(server.url)
        eventually(lambda: page.text("state") == "serving; 1 request ended")
        server.process.send_signal(SIGSTOP)  # connections stay open, and nothing comes
        eventually(lambda: page.text("state").startswith(gone))
        server.process.send_signal(SIGCONT)
        eventually(lambda: page.text("state").startswith("serving"))
        server.process.kill()
        eventually(lambda: page.text("state").startswith(gone))
        assert page.run('document.querySelector("main").className') == "old"
    with running_server("--port", port):
        eventually(lambda: page.text("state") == "serving; 0 requests ended")
        assert page.run('document.querySelector("main").className') == ""
        assert page.text("ttft") == "-" and page.text("hits") == "-", "nothing of the old server's"
