"""What is narrated is what the engine did: its numbers are the counters, its tokens are the outputs."""

from dataclasses import replace

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from rich.console import Console
from support.engines import always_load, greedy, similar_checkpoint, thinking_checkpoint, tiny_llm, token_ids
from support.examples import examples

from tritonllm import LLM, SamplingParams, StructuredOutputsParams
from tritonllm.demo import model_path
from tritonllm.teach.narrate.acts import Bars, BlockTables, Pieces, Said
from tritonllm.teach.narrate.recorder import DrawRecorder
from tritonllm.teach.narrate.show import Show, make_console
from tritonllm.teach.narrate.story import Detail, Story
from tritonllm.teach.narrate.viewer import Narrator, ReadingPace, story_of
from tritonllm.teach.narrate.words import LANGUAGES, sentence

PROMPT = list(range(5, 25))
ALL = Detail(prompts=99, prefills=999, steps=999, draws=99, news=999)
ROOM = 0.001  # GiB of the host's memory: some 1000 blocks of a tiny model


class Listener:
    """Keeps the acts of a run; says all their sentences in both languages, and may show them, as a test that this can
    be done."""

    def __init__(self, llm, recorder=None, detail=ALL, show=False):
        self.story, self.acts, self.broken = story_of(llm.engine, recorder, detail=detail), [], []
        self.story._evicted_first = self.story._evicted = llm.engine._scheduler.pool.evictions
        self.show = show
        consoles = [make_console(open("/dev/null", "w", encoding=code)) for code in ("utf-8", "ascii")]  # noqa: SIM115
        self.shows = [
            Show(words, each, ReadingPace(0)) for words, each in zip(LANGUAGES.values(), consoles, strict=True)
        ]
        self.end = llm.engine.subscribe(self)

    def __call__(self, event):
        try:
            self.take(self.story.tell(event))
        except Exception as error:  # or the engine would drop it and go on
            self.broken.append(error)
            raise

    def take(self, acts):
        self.acts += acts
        for act in acts:
            for said in filter(None, [act.title, *(line for line in act.lines if isinstance(line, Said))]):
                assert all(sentence(words, said) for words in LANGUAGES.values())
            for show in self.shows if self.show else ():
                show.act(act)

    def close(self):
        self.end()
        self.take([self.story.end()])
        assert not self.broken
        return self

    def lines(self, kind):
        return [line for act in self.acts for line in act.lines if isinstance(line, kind)]

    def said(self, *keys):
        return [line for line in self.lines(Said) if line.key in keys]

    def text(self):
        return "\n".join(sentence(LANGUAGES["en"], line) for line in self.lines(Said))


def narrated(llm, prompts, params, detail=ALL, speculates=False, show=False):
    """Outputs and what was told of them, by the narrator's own parameters."""
    narrator = Narrator(speed=0, speculates=speculates)
    listener = Listener(llm, narrator.recorder, detail, show)
    outputs = llm.generate(prompts, [narrator.adapt(p) for p in params], use_tqdm=False)
    assert [output.error for output in outputs] == [None] * len(outputs)
    return outputs, listener.close()


def engines():
    small = {"num_blocks": 24, "max_num_batched_tokens": 24}
    draft = {"model": str(similar_checkpoint()), "num_speculative_tokens": 3, "adaptive": False}
    ngram = {"method": "ngram", "num_speculative_tokens": 3, "adaptive": False}
    return {
        "plain": tiny_llm(**small, async_scheduling=False),
        "ahead": tiny_llm(**small, async_scheduling=True),
        "uncached": tiny_llm(**small, enable_prefix_caching=False),
        "ngram": tiny_llm(**small, speculative_config=ngram, async_scheduling=True),
        "draft": tiny_llm(**small, speculative_config=draft),
        "host": always_load(tiny_llm(num_blocks=16, max_num_batched_tokens=24, kv_offloading_size=ROOM)),
    }


ENGINES = engines()
LOADS = st.tuples(
    st.sampled_from(list(ENGINES)),
    st.lists(
        st.tuples(
            st.lists(st.integers(5, 7), min_size=1, max_size=30),
            st.integers(1, 10),  # new tokens
            st.sampled_from([1, 1, 3]),  # continuations
            st.sampled_from([0.0, 0.0, 1.5]),
        ),
        min_size=1,
        max_size=5,
    ),
)


@given(load=LOADS)
@settings(max_examples=examples(15), deadline=None, phases=[Phase.explicit, Phase.generate])  # shrinking takes minutes
def test_the_numbers_are_the_counters(load):
    """In small pools with preemption, several continuations, prefix hits, drafts and blocks on the host."""
    compare(*load)


FULL = [([5] * 29, 18, 1, 0.0), ([5] * 12 + [6] * 17, 18, 3, 1.5), ([7] * 30, 18, 1, 0.0), ([6] * 30, 18, 1, 0.0)]


@pytest.mark.parametrize(
    "kind, happens",
    [
        ("plain", {"preemptions", "copied_blocks", "evicted_blocks", "cached_tokens"}),
        ("ahead", {"preemptions", "copied_blocks", "evicted_blocks", "cached_tokens"}),
        ("uncached", {"preemptions", "copied_blocks"}),
        ("ngram", {"draft_tokens", "accepted_tokens", "preemptions"}),
        ("draft", {"draft_tokens", "accepted_tokens", "preemptions"}),
        ("host", {"stored_blocks", "loaded_blocks", "preemptions", "evicted_blocks"}),
    ],
)
def test_a_full_pool(kind, happens):
    """The same where it is known what happens."""
    totals = compare(kind, FULL, show=kind == "host")
    assert {name for name in happens if not getattr(totals, name)} == set()


def compare(kind, requests, show=False):
    """Narrate requests, and compare what was told with the engine's counters; returns the totals."""
    llm, speculates = ENGINES[kind], kind in ("ngram", "draft")
    prompts = [prompt for prompt, *_ in requests]
    params = [replace(greedy(tokens, n=n), temperature=temperature, seed=7) for _, tokens, n, temperature in requests]
    before = llm.engine.stats
    pool = llm.engine._scheduler.pool
    evicted = pool.evictions
    outputs, told = narrated(llm, prompts, params, speculates=speculates, show=show)
    after, totals = llm.engine.stats, told.story.totals
    for name, counter in {
        "steps": "steps",
        "prompt_tokens": "prompt_tokens",
        "generated_tokens": "generated_tokens",
        "preemptions": "preemptions",
        "stored_blocks": "stored_blocks",
        "loaded_blocks": "loaded_blocks",
        "draft_tokens": "num_draft_tokens",
        "accepted_tokens": "num_accepted_tokens",
        "forced_tokens": "forced_tokens",
    }.items():
        assert getattr(totals, name) == getattr(after, counter) - getattr(before, counter), name
    assert totals.requests == len(requests)
    assert totals.evicted_blocks == pool.evictions - evicted
    assert totals.cached_tokens == sum(output.num_cached_tokens for output in outputs)
    if all(n == 1 for _, _, n, _ in requests):
        assert totals.cached_tokens == after.prefix_cache_hit_tokens - before.prefix_cache_hit_tokens
    assert vars(replace(told.story.left_out, ends=0)) == {"prompts": 0, "steps": 0, "draws": 0, "news": 0, "ends": 0}
    check_sentences(told, totals, outputs, speculates)
    return totals


def check_sentences(told, totals, outputs, speculates):
    """What single sentences say adds up to the same."""

    def total(key, value):
        return sum(line.values[value] for line in told.said(key))

    vain = told.story.unfinished  # planned ahead, while the last request ended
    assert len(vain) <= 1
    assert total("step_tokens", "tokens") + sum(step.num_tokens for step in vain) == totals.computed_tokens
    assert total("prompt", "tokens") == totals.prompt_tokens
    assert len([act for act in told.acts if act.kind == "step"]) == totals.steps - len(vain)
    assert sum(line.values["count"] for line in told.said("preempted", "preempted_host")) == totals.preemptions
    assert len(told.said("copied")) == totals.copied_blocks
    assert total("evicted", "blocks") == totals.evicted_blocks
    assert total("stored", "blocks") == totals.stored_blocks
    assert total("loaded", "blocks") == totals.loaded_blocks
    verdicts = told.said("verdict_none", "verdict_some", "verdict_all", "verdict_ended")
    assert sum(line.values["drafts"] for line in verdicts) <= totals.draft_tokens  # an output may have ended before
    drawn = told.said("drawn", "drawn_only", "drawn_greedy", "drawn_logprobs")
    assert len(drawn) == totals.generated_tokens, "every token was told of, with its candidates"
    bars = told.lines(Bars)
    assert len(bars) == totals.generated_tokens
    assert all(sum(bar.drawn for bar in line.bars) == 1 for line in bars)
    if not speculates:
        assert all(bar.final > 0 and bar.dropped_by is None for line in bars for bar in line.bars if bar.drawn)
        tokens = sorted(bar.piece.token for line in bars for bar in line.bars if bar.drawn)
        assert tokens == sorted(token for ids in token_ids(outputs) for token in ids)
    for line in told.lines(BlockTables):
        for row in line.rows:
            assert 0 < row.filled <= row.room and row.left_out >= 0


@pytest.mark.parametrize("kind", ENGINES)
def test_tokens_are_the_same_with_it(kind):
    llm = ENGINES[kind]
    prompts = [PROMPT, PROMPT[:7] * 3, PROMPT[::-1]]
    params = [replace(greedy(10, n=n), temperature=t, seed=3, top_p=0.9) for n, t in ((1, 0.0), (2, 1.2), (1, 0.7))]
    expected = token_ids(llm.generate(prompts, params, use_tqdm=False))
    outputs, _ = narrated(llm, prompts, params, speculates=kind in ("ngram", "draft"))
    assert token_ids(outputs) == expected


def test_a_guess_that_was_right_is_told():
    llm = ENGINES["draft"]
    before = llm.engine.stats
    (output,), told = narrated(llm, [PROMPT], [greedy(30)], speculates=True, show=True)
    after = llm.engine.stats
    accepted = sum(line.values["accepted"] for line in told.lines(Said) if line.key.startswith("verdict_"))
    assert accepted == after.num_accepted_tokens - before.num_accepted_tokens == told.story.totals.accepted_tokens > 0
    assert {"verifies", "lesson_drafts", "lesson_logprobs"} <= {line.key for line in told.lines(Said)}
    tables = [row for line in told.lines(BlockTables) for row in line.rows]
    assert tables[-1].filled <= len(PROMPT) + len(output.outputs[0].token_ids)
    shares = [bar for line in told.lines(Bars) for bar in line.bars]
    assert all(bar.final is None and 0 <= bar.model <= 1 for bar in shares)


@pytest.fixture(scope="module")
def demo():
    return LLM(str(model_path()), num_blocks=256, max_num_seqs=8)


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_a_grammar_and_its_masks(demo, temperature):
    """Every token that was drawn is one that the told masks leave; the text is what it is without the narration."""
    wish = StructuredOutputsParams(regex=r"(yes|no), my very good friend")
    params = SamplingParams(temperature=temperature, seed=2, max_tokens=60, structured_outputs=wish)
    (plain,) = demo.generate(["There was"], params, use_tqdm=False)
    assert demo.engine.stats.forced_tokens > 0
    before = demo.engine.stats.forced_tokens
    (output,), told = narrated(demo, ["There was"], [params], show=True)
    assert token_ids([output]) == token_ids([plain])
    assert demo.engine.stats.forced_tokens == before, "each token is drawn, so that its candidates can be told"
    grammar = told.said("stage_grammar", "stage_grammar_one")
    assert len(grammar) == len(output.outputs[0].token_ids)
    assert all(line.values["left"] < line.values["before"] for line in grammar)
    assert told.said("stage_grammar_one") and len(told.said("lesson_grammar")) == 1
    assert all(bar.final > 0 for line in told.lines(Bars) for bar in line.bars if bar.drawn)


def test_forced_tokens_are_told_where_they_come(demo):
    """Without a recorder, as other programs may listen."""
    wish = StructuredOutputsParams(regex=r"(yes|no), my very good friend")
    listener = Listener(demo)
    before = demo.engine.stats.forced_tokens
    params = SamplingParams(temperature=0, max_tokens=60, structured_outputs=wish)
    demo.generate(["There was"], params, use_tqdm=False)
    told = listener.close()
    forced = sum(line.values["tokens"] for line in told.said("forced"))
    assert forced == told.story.totals.forced_tokens == demo.engine.stats.forced_tokens - before > 0
    assert told.said("catches_up") and told.said("lesson_forced") and told.said("total_forced")


def test_penalties_reach_the_account(demo):
    params = SamplingParams(
        temperature=0.7, seed=5, max_tokens=12, repetition_penalty=1.4, frequency_penalty=0.5, min_tokens=12, top_k=20
    )
    (output,), told = narrated(demo, ["A token is a piece of text"], [params])
    assert len(told.said("stage_penalties")) == 12
    assert len(told.said("stage_bans")) == 12  # the end of the text, which min_tokens bans
    drawn = [bar.piece.token for line in told.lines(Bars) for bar in line.bars if bar.drawn]
    assert drawn == token_ids([output])[0]


def test_the_end_of_a_thought_is_forced():
    """It comes as a mask, like a grammar's, but is none."""
    llm = tiny_llm(thinking_checkpoint())
    params = greedy(6, thinking_token_budget=2)
    (output,), told = narrated(llm, [[5, 6, 1]], [params])
    assert output.outputs[0].token_ids[2] == 2
    (forced,) = told.said("stage_thought_budget")
    assert forced.values["left"] == 1 and not told.said("lesson_grammar")


def test_a_recorder_keeps_only_the_first_rows():
    recorder = DrawRecorder(most=2)
    logits = torch.zeros(4)
    assert all(recorder([1], [], logits) is logits for _ in range(3))
    assert len(recorder.take()) == 2 and recorder.take() == []
    recorder.awake = False
    recorder([1], [], logits)
    assert recorder.take() == []


def test_why_a_chunk_has_its_size():
    llm = tiny_llm(max_num_batched_tokens=600, num_blocks=256, max_num_seqs=3, async_scheduling=False)
    listener = Listener(llm)
    engine = llm.engine
    engine.add_request("a", PROMPT, greedy(6))
    engine.step()
    for name in "bcd":
        engine.add_request(name, [ord(name)] * 200, greedy(2))
    while engine.has_unfinished_requests():
        engine.step()
    told = listener.close()
    (share,) = [line for line in told.said("chunk_share") if line.values["name"] == "3"][:1]
    assert (share.values["tokens"], share.values["share"], share.values["left"]) == (56, 256, 144)
    assert told.said("lesson_share") and told.said("chunk_last")
    assert told.said("wait_seats")[0].values == {"count": 1, "running": 3, "free": share_free(told), "budget": 600}
    short = tiny_llm(max_num_batched_tokens=16, async_scheduling=False)
    _, told = narrated(short, [PROMPT * 2, PROMPT], [greedy(2)] * 2)
    chunk = told.said("chunk_budget")[0]
    assert (chunk.values["tokens"], chunk.values["left"], chunk.values["budget"]) == (16, 24, 16)
    assert told.said("wait_tokens") and told.said("no_draw")


def share_free(told):
    return told.said("wait_seats")[0].values["free"]


def test_long_and_many_are_condensed():
    llm = tiny_llm(num_blocks=256, max_num_seqs=16, max_num_batched_tokens=256)
    prompts = [[i + 5] * 40 for i in range(10)]
    outputs, told = narrated(llm, prompts, [greedy(20)] * 10, detail=Detail(), show=True)
    left, totals = told.story.left_out, told.story.totals
    assert left.prompts == 7 and len(told.lines(Pieces)) == 3
    assert all(line.left_out == 8 and len(line.pieces) == 32 for line in told.lines(Pieces))
    full = [act for act in told.acts if act.kind == "step"]
    assert len(full) + left.steps == totals.steps == len(full) + len(told.said("brief", "brief_none"))
    assert len(full) <= Detail().steps + Detail().prefills + 8
    assert len(told.lines(Bars)) + left.draws == totals.generated_tokens == sum(map(len, token_ids(outputs)))
    chunks = [line.values["tokens"] for line in told.said("chunk_budget")]
    assert chunks[0] == 256 - 6 * 40, "the prompt that was cut is one of those that are told"
    assert (
        told.said("more_prefills")
        and told.said("more_tables")
        and told.said("got_more")
        and len(told.said("lesson_brief")) == 1
    )
    spoken = told.text()
    for name in ("left_prompts", "left_steps", "left_draws", "left_ends"):
        assert told.said(name), name
    assert "Left out: the tokens of 7 prompts." in spoken
    assert len(spoken) < 20_000


def test_each_lesson_is_given_once():
    _, told = narrated(ENGINES["plain"], [PROMPT * 2] * 4, [greedy(16, n=2)] * 4, show=True)
    lessons = [line.key for line in told.lines(Said) if line.lesson]
    assert len(lessons) == len(set(lessons)) > 8
    assert all(line.key.startswith("lesson_") == line.lesson for line in told.lines(Said))


def test_a_step_that_breaks_off(monkeypatch):
    llm = tiny_llm()
    listener = Listener(llm, recorder := DrawRecorder())
    params = greedy(3, logits_processors=[recorder])
    llm.engine.add_request("a", PROMPT[::-1], params)
    monkeypatch.setattr(llm.engine._scheduler, "update", lambda *_: 1 / 0)  # its tokens were drawn
    with pytest.raises(ZeroDivisionError):
        llm.engine.step()
    monkeypatch.undo()
    llm.engine.step()
    outputs = llm.generate([PROMPT], params, use_tqdm=False)
    told = listener.close()
    assert "ZeroDivisionError" in told.said("reset")[0].values["reason"]
    drawn = [bar.piece.token for line in told.lines(Bars) for bar in line.bars if bar.drawn]
    assert drawn == token_ids(outputs)[0], "rows that were recorded of the lost step are forgotten"


def test_an_abort_is_told():
    llm = tiny_llm()
    listener = Listener(llm)
    llm.engine.add_request("a", PROMPT, greedy(20))
    llm.engine.step()
    llm.engine.abort_request("a")
    assert listener.close().said("end_abort")[0].values["name"] == "1"


def test_a_tokenizer_is_not_needed():
    story = Story(None, frozenset(), story_of(tiny_llm().engine, None)._limits)
    assert story._reader.text([3, 4]) == "#3 #4" and story._reader.piece(5).text == "#5"


def test_a_reader_makes_blanks_and_controls_visible(demo):
    story = story_of(demo.engine, None)
    ids = demo.engine.tokenizer.encode(" fox\n中")
    texts = [story._reader.piece(token).text for token in ids]
    assert texts[0] == "·fox" and "↵" in texts[1] and "\n" not in "".join(texts)
    assert "�" in texts  # parts of a character


@pytest.mark.parametrize("speed, seconds", [(0, []), (1, [0.6]), (2, [0.3])])
def test_the_pace_is_that_of_a_reader(speed, seconds):
    slept = []
    ReadingPace(speed, slept.append)("three short words")
    assert slept == pytest.approx(seconds)


def test_chinese_is_read_by_signs():
    slept = []
    ReadingPace(1, slept.append)("每块 16 个词元")
    assert slept == pytest.approx([0.1 * 5 + 0.2])


def test_a_recording_console_has_colours():
    assert isinstance(make_console(open("/dev/null", "w"), record=True), Console)  # noqa: SIM115
