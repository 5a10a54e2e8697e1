"""What a replay reads, without a GPU: graphs that run the captured step again."""

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tritonllm.config.sampling_rows import SamplingRows
from tritonllm.engine.data.inputs import upload_step
from tritonllm.engine.data.step import PromptSpan, SharedPrefix, Step
from tritonllm.engine.data.step_inputs import PARAMETERS, StepInputs
from tritonllm.engine.step import graphs as module
from tritonllm.engine.step.common_steps import Need, room_for_rows
from tritonllm.engine.step.device_seats import DeviceSeats
from tritonllm.engine.step.graphs import GraphKey, GraphLimits, StepGraphs
from tritonllm.engine.step.room_sizes import graph_sizes
from tritonllm.engine.step.runner import NOTHING
from tritonllm.layers.attention import paged_attention
from tritonllm.layers.metadata import KVCacheView
from tritonllm.layers.regime import Regimes
from tritonllm.layers.segments import Segment, Segments, decodes, verified

CPU, BLOCK, WIDTH, SEATS = torch.device("cpu"), 4, 6, 20
LONG = WIDTH * BLOCK
REGIMES = Regimes(lambda sequences: 10 if sequences <= 4 else 0, LONG)


def run(graphs, step, key):
    """Load a step and replay its graph, as the runner does."""
    captured = graphs.load(step, key)
    captured.graph.replay()
    return captured


class Model:
    """One layer of attention whose queries are the input ids' rows of a table; remembers its calls."""

    def __init__(self, drafts=0):
        generator = torch.Generator().manual_seed(0)
        self.table = torch.randn(50, 2, 16, generator=generator)
        self.cache = KVCacheView(*torch.randn(2, 200, BLOCK, 1, 16, generator=generator))
        self.calls = []
        self.seats = DeviceSeats(SEATS, BLOCK, CPU, most_drafts=drafts)

    def see(self, step):
        """Let the seats be as the steps before would have left them."""
        decode, verify, _ = step.segments
        state, n = self.seats._state, decode.sequences + verify.sequences
        state.row_seats.fill_(-1)
        seats = torch.from_numpy(step.inputs.seats[:n]).long()
        state.positions[seats] = torch.from_numpy(step.inputs.seq_lens[:n]) - max(1, verify.longest)
        state.last_tokens[seats] = (seats.int() * 7 + 3) % 50
        if step.parameters is not None:
            self.seats.tell(step.parameters)

    def __call__(self, batch):
        i, metadata = batch.inputs, batch.metadata
        self.seats.advance(batch)
        hidden = paged_attention(self.table[i.input_ids.long()], metadata, self.cache).flatten(1) + i.positions[:, None]
        tokens = None
        if batch.draws and not metadata.segments.chunk.tokens:
            s = batch.sampling(metadata.segments.sequences)
            tokens = s.seeds * 1000 + s.steps + (s.temperature * 7).long() + s.top_k
        self.calls.append((batch, hidden))
        return hidden[i.logit_rows] if metadata.segments.chunk.tokens else hidden, tokens


def capture(model, kinds=None):
    """In the place of a GPU's: replays run the captured step again."""

    class Graph:
        def __init__(self, outputs):
            self.batch, self.outputs = model.calls[-1][0], outputs

        def replay(self):
            for old, new in zip(self.outputs, model(self.batch), strict=True):
                if old is not None:
                    old.copy_(new)

    def captured(work, with_prompts):
        if kinds is not None:
            kinds.append(with_prompts)
        outputs = work()
        return Graph(outputs), outputs

    return captured


def make_graphs(model, may_share=lambda size: size >= 4, kinds=None, drafts=0, mark=None):
    """With room for 2, 5 or 20 decodes and 8 tokens of three chunks, or 20 decodes and 20 tokens of five chunks."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "decode_sizes", lambda seats, tokens: [2, 5, seats] if tokens == 8 else [seats])
        patch.setattr(module, "late_sizes", lambda seats: [seats])
        sizes = (8, 20, 200)  # the last is more padding than fits the longest sequences
        limits = GraphLimits(SEATS, sizes, WIDTH, BLOCK, drafts, 6)
        return StepGraphs(model, limits, CPU, may_share, REGIMES, capture(model, kinds), mark)


@pytest.fixture(autouse=True)
def chunk_capacity(monkeypatch):
    monkeypatch.setattr(module, "chunk_capacity", lambda tokens: 4 if tokens == 8 else 6)


@pytest.fixture(scope="module")
def shared_graphs():
    model = Model()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "chunk_capacity", lambda tokens: 4 if tokens == 8 else 6)
        return make_graphs(model), model


def test_steps_with_prompts_say_where_their_layers_end():
    """Each captured one in its own way, and the others not at all."""
    marks = []

    def mark():
        marks.append(SimpleNamespace(note=lambda layer: None, events={}))
        return marks[-1]

    graphs = make_graphs(Model(), mark=mark)
    kept = [(key, captured.marks) for key, captured in graphs._graphs.items()]
    assert [of for key, of in kept if key.tokens] == marks and len(marks) > 1
    assert all(of is None for key, of in kept if not key.tokens)
    for captured in graphs._graphs.values():
        assert captured.batch.metadata.stored is (captured.marks and captured.marks.note)
    assert all(captured.marks is None for captured in make_graphs(Model())._graphs.values())


def step_of(lengths, chunks=(), seed=0):
    """Decodes of these lengths (negative: the token is in flight) and chunks of (cached, new) tokens."""
    rng = np.random.default_rng(seed)
    spans = [(abs(length) - 1, 1) for length in lengths] + list(chunks)
    n, width = len(lengths), max(-(-(start + count) // BLOCK) for start, count in spans)
    positions = np.concatenate([np.arange(start, start + count) for start, count in spans])
    ids = rng.integers(0, 50, len(positions)).astype(np.int32)
    in_flight = np.array(lengths, dtype=int) < 0
    ids[:n][in_flight] = -1
    slots = np.arange(len(positions)) + 7
    positions[:n], slots[:n] = 0, -1  # the device derives them
    samples = (np.arange(len(spans)) < n) | (rng.random(len(spans)) < 0.5)  # not all prompts end here
    ends = np.cumsum([count for _, count in spans]) - 1
    rows, counts = int(samples.sum()), [count for _, count in chunks]
    seq_lens = np.array([start + count for start, count in spans], dtype=np.int32)
    starts = seq_lens - 1
    starts[:n][in_flight] = -1
    parameters = {
        name: (rng.random(SEATS) * 9).astype(column.dtype) + (name == "steps") for name, column in PARAMETERS.items()
    }
    inputs = StepInputs(
        positions=positions,
        slot_mapping=slots,
        logit_rows=ends[samples],
        input_ids=ids,
        seq_lens=seq_lens,
        decode_order=np.argsort(-seq_lens[:n], kind="stable").astype(np.int32),
        drafts=np.zeros(0, dtype=np.int32),
        verify_starts=np.zeros(1, dtype=np.int32),
        cu_seqlens_q=np.cumsum([0, *counts]).astype(np.int32),
        seats=rng.permutation(SEATS)[:rows].astype(np.int32),
        starts=starts[samples],
        limits=np.full(rows, LONG, dtype=np.int32),
    )
    segments = Segments(decodes(n), chunk=Segment(len(chunks), sum(counts), max(counts, default=0)))
    tables = rng.permutation(200)[: len(spans) * width].reshape(len(spans), width).astype(np.int32)
    longest = int(seq_lens[:n].max(initial=0))
    return Step(segments, inputs, tables, samples, SamplingRows(**parameters), longest)


def sharing(n, blocks, who, seed=0):
    """Decodes of which those in ``who`` share blocks; 0 blocks: an ordinary step."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(blocks * BLOCK + 2, (WIDTH - 1) * BLOCK, n) * rng.choice((-1, 1), n)  # some in flight
    step = step_of(lengths.tolist(), seed=seed)
    if not blocks:
        return step
    shares = np.isin(np.arange(n), who)
    step.block_tables[shares, :blocks] = step.block_tables[who[0], :blocks]
    return dataclasses.replace(step, shared=SharedPrefix(blocks, shares))


def eagerly(model, step):
    """The batch, and hidden states and tokens without a graph."""
    model.see(step)
    batch = upload_step(step, step.num_rows, BLOCK, CPU)
    return batch, *model(batch)


def test_replays_of_decodes_equal_steps_without_graphs():
    """Large batches before small ones, and steps that share before others: nothing of an earlier step may show."""
    model = Model()
    graphs, everyone = make_graphs(model), list(range(SEATS))
    for seed, (n, blocks, who) in enumerate((
        *((20, 4, everyone), (18, 0, []), (17, 2, everyone[3:]), (5, 0, []), (5, 0, []), (3, 0, [])),
        *((13, 3, [0]), (20, 1, everyone[::2]), (1, 0, [])),
    )):  # fmt: skip
        step = sharing(n, blocks, who, seed)
        key = graphs.key_for(step)
        assert (key.tokens, key.shared) == (0, blocks > 0)
        assert key.max_decode_len == (10 if step.longest <= 10 and key.decodes <= 4 else LONG)
        model.see(step)
        captured = run(graphs, step, key)
        hidden, tokens = captured.hidden.clone(), captured.tokens.clone()
        metadata = captured.batch.metadata
        assert (metadata.cascade is not None) == (blocks > 0)
        assert (metadata.slot_mapping[n:] == -1).all() and (metadata.seq_lens[n:] == 0).all()
        size = len(metadata.seq_lens)
        assert len(hidden) == len(tokens) == size == key.decodes
        assert metadata.decode_order.tolist() == [*step.inputs.decode_order.tolist(), *range(n, size)]
        assert captured.batch.rows.top_p[n:].tolist() == [1.0] * (size - n)
        batch, *wanted = eagerly(model, step)
        for mine, other in zip(captured.batch.sampling(n), batch.sampling(n), strict=True):
            assert torch.equal(mine, other)
        for name in ("input_ids", "positions", "slot_mapping", "seq_lens"):
            assert torch.equal(getattr(captured.batch.inputs, name)[:n], getattr(batch.inputs, name)), name
        torch.testing.assert_close([hidden[:n], tokens[:n]], wanted)


@given(
    lengths=st.lists(st.integers(-20, 20).filter(bool), max_size=10),
    chunks=st.lists(st.tuples(st.integers(0, 12), st.integers(1, 8)), max_size=5),
    forks=st.lists(st.integers(0, 4), max_size=4),
    seed=st.integers(0, 99),
)
def test_replays_equal_steps_without_graphs(shared_graphs, lengths, chunks, forks, seed):
    """Behind some chunks come siblings, which bring no tokens and sample from their last rows."""
    graphs, model = shared_graphs
    for at in [at for at in sorted(forks, reverse=True) if at < len(chunks)][: 5 - len(chunks)]:
        chunks = [*chunks[: at + 1], (sum(chunks[at]), 0), *chunks[at + 1 :]]
    lengths = lengths or [3] * (not chunks)
    step = step_of(lengths, chunks, seed)
    n, key = len(lengths), graphs.key_for(step)
    if sum(count for _, count in chunks) > 20:
        assert key is None
        return
    model.see(step)
    captured = run(graphs, step, key)
    wanted, (batch, padded) = captured.hidden.clone(), model.calls[-1]
    metadata = batch.metadata
    assert metadata.segments.decode == decodes(key.decodes) and metadata.segments.chunk.tokens == key.tokens
    assert len(padded) == len(batch.inputs.input_ids) == key.decodes + key.tokens
    used = [*range(n), *range(key.decodes, key.decodes + key.tokens)][: step.segments.tokens]
    slots = metadata.slot_mapping[used].tolist()
    assert sorted(metadata.slot_mapping[metadata.slot_mapping >= 0].tolist()) == sorted(slots)
    assert slots[n:] == step.inputs.slot_mapping[n:].tolist()
    assert metadata.cu_seqlens_q[-1] == key.tokens
    assert metadata.decode_order.tolist() == [*step.inputs.decode_order.tolist(), *range(n, key.decodes)]
    assert padded.isfinite().all()
    eager, expected, tokens = eagerly(model, step)
    assert slots[:n] == eager.metadata.slot_mapping[:n].tolist()
    torch.testing.assert_close(wanted[: step.num_rows], expected)
    if tokens is not None:
        assert torch.equal(captured.tokens[:n], tokens)
    rows = len(wanted)
    assert rows in (0, *graph_sizes(SEATS))


some_steps = st.tuples(
    st.lists(st.integers(1, 20), max_size=10),
    st.lists(st.tuples(st.integers(0, 12), st.integers(1, 4)), max_size=4),
    st.booleans(),
)


@given(steps=st.lists(some_steps, min_size=2, max_size=4).filter(lambda steps: any(a or b for a, b, _ in steps)))
def test_steps_that_are_taken_together_replay_graphs_of_one_room(shared_graphs, steps):
    """Of several engines, some perhaps with nothing to do; each gets what it would get alone."""
    graphs, model = shared_graphs
    steps = [
        dataclasses.replace(step_of(lengths, chunks, seed), late=late) if lengths or chunks else NOTHING
        for seed, (lengths, chunks, late) in enumerate(steps)
    ]
    need = Need.of_all(map(Need.of, steps))
    keys = [graphs.key_for(step, need) for step in steps]
    assert len({None if key is None else key.room_key for key in keys}) == 1
    if keys[0] is None:
        assert need.tokens > 20 or need.chunks == 6
        return
    for step, key in zip(steps, keys, strict=True):
        assert key.late == (step.late and not key.tokens)
        model.see(step)
        found = run(graphs, step, key).hidden.clone()
        if step is NOTHING:
            continue
        _, hidden, _ = eagerly(model, step)
        torch.testing.assert_close(found[: step.num_rows], hidden[: step.num_rows])


def test_one_step_that_cannot_be_captured_makes_all_of_them_eager(shared_graphs):
    graphs, _ = shared_graphs
    span = PromptSpan("a", 1, 0, np.array([1]), 0)
    plain, wants_all = step_of([3] * 3), dataclasses.replace(step_of([], [(0, 3)]), prompt_spans=(span,))
    assert graphs.key_for(plain) is not None
    need = Need.of_all(map(Need.of, (plain, wants_all)))
    assert graphs.key_for(plain, need) is None and graphs.key_for(wants_all, need) is None
    assert need.rows == 3 and graphs.key_for(plain, Need.of_all([Need.of(plain), Need.of(NOTHING)])).decodes == 4


@pytest.mark.parametrize(("rows", "room"), [(0, 1), (1, 1), (2, 2), (3, 4), (64, 64), (65, 100), (100, 100)])
def test_rows_that_are_not_captured_have_room_by_powers_of_two(rows, room):
    assert room_for_rows(rows, 100) == room


def verify_step(lengths, drafts, seed=0):
    """Sequences of these lengths (negative: the last token is in flight) with drafts that the host knows."""
    step = step_of(lengths, seed=seed)
    n, each, rng = len(lengths), 1 + drafts, np.random.default_rng(seed)
    ids = rng.integers(0, 50, (n, each)).astype(np.int32)
    ids[:, 0] = step.inputs.input_ids
    inputs = dataclasses.replace(
        step.inputs,
        input_ids=ids.flatten(),
        positions=np.zeros(n * each, dtype=np.int64),
        slot_mapping=np.full(n * each, -1),
        logit_rows=np.arange(n) * each,
        seq_lens=step.inputs.seq_lens + np.int32(drafts),
        decode_order=np.zeros(0, dtype=np.int32),
        drafts=rng.integers(0, drafts + 1, n).astype(np.int32),
        verify_starts=(np.arange(n + 1) * each).astype(np.int32),
    )
    tables = rng.permutation(200)[: n * WIDTH].reshape(n, WIDTH).astype(np.int32)
    segments = Segments(verify=verified(n, each))
    return dataclasses.replace(step, inputs=inputs, block_tables=tables, segments=segments, longest=0)


def test_replays_with_drafts_equal_steps_without_graphs():
    """After larger ones, and between steps without drafts: nothing of an earlier step may show."""
    model = Model(drafts=2)
    graphs = make_graphs(model, drafts=2)
    rooms = [(len(batch.inputs.drafts), len(batch.inputs.input_ids)) for batch, _ in model.calls]
    assert rooms[:4] == [(6, 18), (4, 12), (2, 6), (1, 3)]
    for seed, lengths in enumerate(([3, -9, 20, 1, -15, 4], [-5, 2, 17], [8], [-19], [2, -3, 4])):
        step = verify_step(lengths, 2, seed)
        n, key = len(lengths), graphs.key_for(step)
        assert key == GraphKey({6: 6, 3: 4, 1: 1}[n], 0, LONG, drafts=2)
        model.see(step)
        captured = run(graphs, step, key)
        hidden, tokens, batch = captured.hidden.clone(), captured.tokens.clone(), captured.batch
        assert hidden.isfinite().all() and len(hidden) == 3 * key.decodes
        assert batch.metadata.verify_starts.tolist() == list(range(0, 3 * key.decodes + 1, 3))
        assert (batch.inputs.slot_mapping[3 * n :] == -1).all()
        eager, *wanted = eagerly(model, step)
        torch.testing.assert_close([hidden[: 3 * n], tokens[:n]], wanted)
        for name in ("input_ids", "positions", "slot_mapping"):
            assert torch.equal(getattr(batch.inputs, name)[: 3 * n], getattr(eager.inputs, name)), name
        stored = (eager.inputs.slot_mapping.view(n, 3) >= 0).sum(1) - 1
        assert torch.equal(stored, eager.inputs.drafts)
        plain = step_of([4, -7, 3], seed=seed)
        model.see(plain)
        hidden = run(graphs, plain, graphs.key_for(plain)).hidden[:3].clone()
        torch.testing.assert_close(hidden, eagerly(model, plain)[1])


def test_what_has_no_room_with_drafts():
    graphs = make_graphs(Model(drafts=2), drafts=2)
    assert graphs.key_for(verify_step([3] * 7, 2)) is None
    assert graphs.key_for(verify_step([3], 1)) is None


def test_what_has_no_room(shared_graphs):
    graphs, _ = shared_graphs
    key_for = lambda *args: graphs.key_for(step_of(*args))  # noqa: E731
    assert key_for([3]) == GraphKey(1, 0, 10)
    assert key_for([10, 9, 3]) == GraphKey(4, 0, 10)
    assert key_for([11, 9, 3]) == GraphKey(4, 0, LONG)
    assert key_for([3] * 5) == GraphKey(8, 0, LONG)  # where the padding decides too
    assert key_for([3], [(0, 8)]) == GraphKey(2, 8, LONG)
    assert key_for([3] * 3, [(0, 8)]) == GraphKey(5, 8, LONG)
    assert key_for([3], [(0, 9)]) == GraphKey(20, 20, LONG)
    assert key_for([3], [(0, 1)] * 4) == GraphKey(20, 20, LONG)  # there must be a chunk for the padding
    assert key_for([3], [(0, 2)] * 6) is None
    assert key_for([3], [(0, 21)]) is None
    step = step_of([3, 3], [(0, 8)])
    span = PromptSpan("r", 1, 2, np.arange(7), 0)
    assert graphs.key_for(dataclasses.replace(step, prompt_spans=(span,))) is None
    assert graphs.key_for(dataclasses.replace(step, shared=SharedPrefix(1, np.ones(2, dtype=bool)))) is None
    verify = dataclasses.replace(step.segments, verify=Segment(1, 3, 3))
    assert graphs.key_for(dataclasses.replace(step, segments=verify)) is None


def test_what_is_captured_when():
    """All at the start, the largest of a kind first. Of shared prefixes few sizes, which hold the others."""
    model, kinds = Model(), []
    graphs = make_graphs(model, may_share=lambda size: size >= 16, kinds=kinds)

    def seen(batch):
        metadata = batch.metadata
        return len(metadata.decode_order), metadata.segments.chunk.tokens, metadata.cascade is not None

    rooms = [seen(batch) for batch, _ in model.calls]
    alone = [(20, 0, False), (20, 0, True), (16, 0, False), (16, 0, True), (8, 0, False)]
    small = [(size, 0, False) for size in (4, 4, 2, 2, 1, 1)]  # for two regimes
    late = [(20, 0, False), (20, 0, True)]
    beside = [(20, 20, False), (20, 8, False), (5, 8, False), (2, 8, False)]
    assert rooms == [*alone, *small, *late, *beside]
    assert [b.draws for b, _ in model.calls] == [True] * 11 + [False] * 2 + [True] * 4
    assert [b.metadata.max_decode_len for b, _ in model.calls] == [LONG] * 5 + [10, LONG] * 3 + [LONG] * 6
    assert kinds == [tokens > 0 for _, tokens, _ in rooms]
    for count, room in ((18, 20), (16, 16), (9, 16)):
        before = len(model.calls)
        step = sharing(count, 4, list(range(count)))
        run(graphs, step, graphs.key_for(step))
        assert [seen(batch) for batch, _ in model.calls[before:]] == [(room, 0, True)], "a replay, and no capture"


def test_late_steps_have_graphs_of_their_own():
    """For few sizes, from the start on; they end with the hidden states that the others have, and draw nothing."""
    model = Model()
    graphs = make_graphs(model)
    captured = len(graphs)
    for seed, (n, room) in enumerate(((20, 20), (18, 20), (3, 20), (18, 20))):
        plain = step_of([5] * n, seed=seed)
        step = dataclasses.replace(plain, late=True)
        key = graphs.key_for(step)
        assert (key.late, key.decodes, key.tokens, key.drafts) == (True, room, 0, 0)
        model.see(step)
        late = run(graphs, step, key)
        assert late.tokens is None
        hidden = late.hidden[:n].clone()
        model.see(plain)
        expected = run(graphs, plain, graphs.key_for(plain)).hidden[:n]
        torch.testing.assert_close(hidden, expected, rtol=1e-6, atol=1e-6)  # 3 rows of 20 and of 4: other roundings
    assert len(graphs) == captured
    with_prompt = dataclasses.replace(step_of([3], [(0, 8)]), late=True)
    assert graphs.key_for(with_prompt) == graphs.key_for(dataclasses.replace(with_prompt, late=False))


@given(
    st.integers(4, SEATS), st.integers(1, 4), st.sampled_from([{"late": True}, {"logprobs": 8}, {}]), st.integers(0, 9)
)
def test_shared_prefixes_in_any_room(shared_graphs, n, blocks, wish, seed):
    """The plan is made for the room's number of sequences, which may want fewer parts of the shared keys."""
    graphs, model = shared_graphs
    who = np.flatnonzero(np.random.default_rng(seed).random(n) < 0.7).tolist() or [0]
    step = dataclasses.replace(sharing(n, blocks, who, seed), **wish)
    _, hidden, _ = eagerly(model, step)
    model.see(step)
    replayed = run(graphs, step, graphs.key_for(step))
    torch.testing.assert_close(replayed.hidden[:n], hidden)


def test_steps_that_are_drawn_outside_take_graphs_without_a_draw_where_that_is_no_more_padding():
    graphs = make_graphs(Model())
    for n, room, late in ((20, 20, True), (18, 20, True), (16, 16, False), (3, 4, False)):
        plain = step_of([5] * n)
        for wish in ({"logprobs": 8}, {"edited": np.zeros(n, dtype=np.int32)}, {"redrawn": True}):
            key = graphs.key_for(dataclasses.replace(plain, **wish))
            assert (key.late, key.decodes, key.tokens) == (late, room, 0)
        assert graphs.key_for(plain) == key._replace(late=False)


def test_an_interrupted_upload_of_tables_is_done_again(monkeypatch):
    model = Model()
    graphs, steps = make_graphs(model), [sharing(5, 0, [], seed) for seed in (1, 2)]
    run(graphs, steps[0], GraphKey(8, 0, LONG))
    with monkeypatch.context() as patch:
        patch.setattr(module, "upload_one", lambda *args: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            run(graphs, steps[1], GraphKey(8, 0, LONG))
    model.see(steps[1])
    captured = run(graphs, steps[1], GraphKey(8, 0, LONG))
    torch.testing.assert_close(captured.hidden[:5], eagerly(model, steps[1])[1])


def test_tables_go_to_the_device_only_when_they_have_changed(monkeypatch):
    model, sent = Model(), []
    graphs, upload = make_graphs(model), module.upload_one
    monkeypatch.setattr(module, "upload_one", lambda array, device: sent.append(array) or upload(array, device))
    step, mixed = sharing(5, 0, []), step_of([3], [(0, 8)])
    for next_step, count in ((step, 1), (step, 1), (mixed, 2), (step, 3), (step, 3)):
        run(graphs, next_step, graphs.key_for(next_step))
        assert len(sent) == count
    model.see(step)
    torch.testing.assert_close(run(graphs, step, graphs.key_for(step)).hidden[:5], eagerly(model, step)[1])
