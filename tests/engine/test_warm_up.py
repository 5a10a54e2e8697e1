"""The steps before the first request load every kernel that steps of other sizes launch."""

import dataclasses
import json
from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.examples import examples
from support.mechanism_configs import MECHANISMS
from support.real_configs import LLAMA_3_1_8B, QWEN3_0_6B
from support.specializations import described

from tritonllm.config.engine import EngineConfig
from tritonllm.config.speculative import OF_HEADS
from tritonllm.dist.exchange import Exchange
from tritonllm.dist.group import ALONE, Group
from tritonllm.dist.pipeline import UNDIVIDED, Pipeline, Team
from tritonllm.engine.data.step import PromptSpan
from tritonllm.engine.drafts.draft_model import make_head
from tritonllm.engine.start.precompile import META, NUM_BLOCKS, Target, kernels_of, list_kernels, pretend, target_of
from tritonllm.engine.step.common_steps import Need
from tritonllm.engine.step.dummy_step import dummy_step
from tritonllm.engine.step.preparation import rehearsal_of
from tritonllm.engine.step.runner import ModelRunner
from tritonllm.engine.step.warm_up import StepLimits, WarmUp, Work
from tritonllm.experts.load import ExpertLoad
from tritonllm.experts.rebalance import rebalance
from tritonllm.kernels import cascade_decode_attention, plan_cascade
from tritonllm.layers.regime import Regimes
from tritonllm.models.decoder import Decoder
from tritonllm.models.eagle_files import read_eagle_spec
from tritonllm.models.expert_checks import dealt_out
from tritonllm.models.families import spec_from_config
from tritonllm.models.local_spec import by_expert
from tritonllm.models.stages import Stage

MODELS = {"qwen3-0.6b": QWEN3_0_6B, "llama-3.1-8b": LLAMA_3_1_8B, **MECHANISMS}
LENGTH = 2304
MODELS["llama-3.2-1b"] = LLAMA_3_1_8B | {"head_dim": 64, "hidden_size": 2048, "intermediate_size": 8192}
MODELS["llama, 2 key heads"] = LLAMA_3_1_8B | {"num_key_value_heads": 2}
CHOSEN = ("gemma-3-1b", "gpt-oss-20b", "falcon-7b", "phi-2")
DRAFT = "llama-3.2-1b"
VARIED = [name for name in MODELS if name.startswith((*CHOSEN, "qwen3-0.6b", "llama-"))]


def rows_of_logits(seats):
    """All up to 40, then a quarter: a kernel for 8 rows or more in a row is met, and sizes that are multiples
    of 8, 16 or none, which Triton compiles apart. All 256 of 23 models took a quarter of the file's time."""
    return [rows for rows in range(1, seats + 1) if rows <= 40 or rows % 8 in (0, 1) or rows == seats - 1]


def short_prompts(tokens, longest, width):
    lengths = [*[longest] * (tokens // longest), *[tokens % longest] * (tokens % longest > 0)]
    return dummy_step(0, lengths, rows=len(lengths), width=max(width, -(-longest // 16)))


SIZES = [
    *((model, 256, "NVIDIA H200") for model in MODELS),
    *((model, seats, gpu) for model in VARIED for seats, gpu in ((16, "NVIDIA H200"), (256, None))),
]
# In `make test`: layers of equal and of several kinds, and experts, each with one number of seats.
OF_MAKE_TEST = {"qwen3-0.6b": (16, "NVIDIA H200"), "gpt-oss-20b": (256, "NVIDIA H200"), "gemma-3-1b": (256, None)}
SIZES_FIRST = [(name, *how) for begin, how in OF_MAKE_TEST.items() for name in MODELS if name.startswith(begin)]


@pytest.mark.parametrize(
    ("model", "seats", "gpu"),
    [*SIZES_FIRST, *(pytest.param(*size, marks=pytest.mark.long) for size in SIZES if size not in SIZES_FIRST)],
)
def test_sizes_between_launch_the_same_kernels(model, seats, gpu):
    check_sizes(MODELS[model], seats, gpu)


@pytest.mark.parametrize("seats", [16, 32])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(14, 2, 64), (24, 8, 128), (40, 8, 128), (12, 4, 256)])
def test_so_do_they_without_hopper(heads, kv_heads, head_dim, seats):
    """Also where a key's query heads are no power of two, so that rows pass one between powers of two of tokens."""
    shape = {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": head_dim}
    check_sizes(LLAMA_3_1_8B | shape, seats, None, arch=80, longest=(1, 2, 3, 5, 9, 17, 30, 500))


@pytest.mark.parametrize("group", [3, 5])
def test_sequences_that_share_a_prefix_launch_what_the_next_power_of_two_launches(group):
    """Also where a key's query heads are no power of two: rows and tokens then pass theirs at different numbers."""
    with pretend(target_of(90)), list_kernels("NVIDIA H200") as found, torch.inference_mode():

        def launched(sequences):
            found.clear()
            cache = torch.empty(64, 16, 8, 128, dtype=torch.bfloat16, device=META)
            tables = torch.empty(sequences, 64, dtype=torch.int32, device=META)
            lens = torch.empty(sequences, dtype=torch.int32, device=META)
            plan = plan_cascade(tables, lens, torch.empty(sequences, dtype=torch.bool, device=META), 48, 16)
            q = torch.empty(sequences, 8 * group, 128, dtype=torch.bfloat16, device=META)
            cascade_decode_attention(q, cache, cache, plan, max_seqlen_k=10**5)
            return {described(kernel) for kernel in found if kernel.name.startswith("_prefill")}

        known = set().union(*(launched(1 << bit) for bit in range(8)))
        assert known
        for sequences in range(3, 128):
            assert launched(sequences) <= known, sequences


def check_sizes(model, seats, gpu, arch=90, longest=(4, 30, 500)):
    """Prompts (one or many in a step), decodes and rows of logits of sizes that the warm-up leaves out, with tables of
    any width."""
    spec = spec_from_config(model).without_repeats()
    config = EngineConfig.from_kwargs(
        model="m", max_num_seqs=seats, max_num_batched_tokens=32 * seats, max_model_len=LENGTH
    )
    with pretend(target_of(arch)), list_kernels(gpu) as found, torch.inference_mode():
        decoder = Decoder(spec, dtype=torch.bfloat16, device=META, max_model_len=LENGTH)
        runner = ModelRunner(decoder, config, META, LENGTH)
        runner.start(NUM_BLOCKS, LENGTH)
        with decoder.rehearsal():
            steps = runner.warm_up()
            steps.run()
            loaded = {described(kernel) for kernel in found}
            assert len(loaded) > 10
            found.clear()
            kinds = [{}, {"prompt_token": True}, {"shared": True}]
            for sequences, width, kind in product((1, 2, 3, 7, seats - 1), (1, 3, 45, 100), kinds):
                if "shared" not in kind or runner._may_share(sequences):
                    steps.decode_step(sequences, width, **kind)
            beyond = [(1 << bit) + 1 for bit in range(1, 13)]  # powers of two, which the warm-up has
            sizes = (*beyond, 100, 300, 600, 1023, 1500, 20 * seats, 32 * seats - 1)
            for tokens, width in product((n for n in sizes if n <= 32 * seats), (1, 100)):
                steps.prefill_step(tokens, width)
                for each in longest:
                    if each < tokens <= each * seats:
                        runner.follow(short_prompts(tokens, each, width))
            for rows in rows_of_logits(seats):
                runner._drawing.warm_up(torch.empty(rows, spec.hidden_size, dtype=torch.bfloat16, device=META))
    assert {described(kernel) for kernel in found} <= loaded


@pytest.mark.parametrize("block_size", [8, 32])
def test_widths_between_launch_the_same_kernels(block_size):
    """Without captured steps, which have other sizes: prompts of more tokens than are few, with tables whose widths the
    warm-up leaves out."""
    model = next(name for name in VARIED if name.startswith("qwen3-0.6b"))
    spec = spec_from_config(MODELS[model]).without_repeats()
    config = EngineConfig.from_kwargs(model="m", max_model_len=LENGTH, block_size=block_size, enforce_eager=True)
    with pretend(target_of(90)), list_kernels("NVIDIA H200") as found, torch.inference_mode():
        decoder = Decoder(spec, dtype=torch.bfloat16, device=META, max_model_len=LENGTH)
        runner = ModelRunner(decoder, config, META, LENGTH)
        runner.start(NUM_BLOCKS, LENGTH)
        with decoder.rehearsal():
            runner.warm_up().run()
            loaded = {described(kernel) for kernel in found}
            found.clear()
            for tokens, longest in product((300, 1200, 3000), (20, 300, 600, 1000, 1900)):
                if longest <= tokens:
                    runner.warm_up().prefill_step(tokens, longest=longest, sample=False)
    assert {described(kernel) for kernel in found} <= loaded


@st.composite
def steps(draw, seats, budget, longest, may_share, block=16):
    """Any step that a scheduler may plan: decodes beside chunks of prompts that may have a past, and continuations that
    share a chunk's last row; log-probabilities of a prompt, for which the hidden states of all tokens are wanted;
    copies of blocks."""
    chunks = draw(st.lists(st.one_of(st.integers(1, 40), st.integers(1, budget)), max_size=8))
    while chunks and sum(chunks) > budget:
        chunks.pop()
    n = draw(st.one_of(st.integers(0, 8), st.integers(0, seats)))
    n = max(min(n, seats - len(chunks), budget - sum(chunks)), 0 if chunks else 1)
    forks = draw(st.integers(0, seats - n - len(chunks))) if chunks else 0
    least = max([1, *chunks])
    keys = draw(st.one_of(st.integers(least, min(max(2 * least, 64), longest)), st.integers(least, longest)))
    rows = n + (len(chunks) + forks if forks else draw(st.integers(0, len(chunks))))
    shared = may_share(n) and draw(st.booleans())
    longest = draw(st.integers(1, keys))
    reported = chunks[: draw(st.integers(0, 1))]
    spans = tuple(PromptSpan("a", 1, n, np.zeros(length, dtype=np.int64), 1) for length in reported)
    chunks = [*chunks, *[0] * forks]
    step = dummy_step(n, chunks, rows=rows, width=-(-keys // block), shared=shared, longest=longest)
    step.inputs.logit_rows[n:] = np.maximum(n + np.cumsum(chunks)[: rows - n] - 1, 0)
    copies = draw(st.integers(0, seats))
    pairs = np.zeros((copies, 2), dtype=np.int64) if copies else None
    return dataclasses.replace(step, copies=pairs, limited=draw(st.booleans()), prompt_spans=spans)


@pytest.mark.parametrize(
    ("gpu", "length"), [("NVIDIA H200", 600), ("NVIDIA H200", 6144), ("NVIDIA H200", 131072), (None, 6144)]
)
@pytest.mark.parametrize("model", VARIED)
@pytest.mark.long
@pytest.mark.smoke  # with fewer examples
def test_no_step_launches_what_the_start_has_not(model, length, gpu):
    check_launches(model, length, gpu)


@pytest.mark.parametrize("model", [name for name in MODELS if name.startswith(("gemma-4", "laguna"))])
@pytest.mark.long
@pytest.mark.smoke  # with fewer examples
def test_no_step_of_layers_that_differ_launches_what_the_start_has_not(model):
    """In heads, and in whether they have keys of their own."""
    check_launches(model, 6144, "NVIDIA H200")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    "model", ["llama-3.1-8b", *(name for name in MODELS if name.startswith(("qwen3-", "gpt-oss")))]
)
@pytest.mark.long
@pytest.mark.smoke  # with fewer examples
def test_no_step_of_few_seats_launches_what_the_start_has_not(model, dtype):
    """Many tokens, of which few are sampled from, but sometimes all wanted."""
    check_launches(model, 6144, "NVIDIA H200", seats=8, budget=5000, dtype=dtype)


@pytest.mark.parametrize("length", [3000, 4096, 131072])
@pytest.mark.parametrize("model", ["llama-3.1-8b", *(name for name in VARIED if name.startswith("gpt-oss"))])
@pytest.mark.long
@pytest.mark.smoke  # with fewer examples
def test_no_batch_invariant_step_launches_what_the_start_has_not(model, length):
    check_launches(model, length, "NVIDIA H200", deterministic=True, seats=256, budget=3000)


@pytest.mark.parametrize("model", [name for name in MODELS if name.startswith(("qwen3-30b", "gpt-oss"))])
@pytest.mark.long
@pytest.mark.smoke  # with fewer examples
def test_no_step_of_placed_experts_launches_what_the_start_has_not(model):
    """With copies, whose tokens take turns, and with experts that are counted."""
    check_launches(model, 6144, "NVIDIA H200", ranks=4)


class Others:
    """Engines that take their steps together with this one, which is the first of them.

    Attributes:
        needs: what the next step of the others needs.
    """

    def __init__(self):
        self.needs = []

    def agree(self, words):
        return [list(words), *map(list, self.needs)]


@st.composite
def needs(draw, seats, budget):
    """What an engine's next step needs: perhaps nothing."""
    decodes = draw(st.integers(0, min(seats, budget)))
    tokens = draw(st.one_of(st.just(0), st.integers(0, budget - decodes)))
    chunks = min(tokens, seats - decodes, draw(st.integers(1, 8)))
    return Need(decodes, tokens if chunks else 0, chunks, draw(st.booleans()), draw(st.booleans()), decodes + tokens)


@pytest.mark.parametrize(
    ("sizes", "dtype", "eager"),
    [
        ((64, 512), torch.bfloat16, False),
        ((8, 5000), torch.float32, True),
        ((1000, 1000), torch.bfloat16, False),
    ],
)
@pytest.mark.parametrize("engines", [2, 4])
@pytest.mark.parametrize("model", [name for name in MODELS if name.startswith(("qwen3-30b", "gpt-oss", "glm-4.5"))])
@pytest.mark.long
@pytest.mark.smoke  # with fewer examples
def test_no_step_of_shared_experts_launches_what_the_start_has_not(model, engines, sizes, dtype, eager):
    """However many rows come from the others, also where this one has nothing to compute."""
    seats, budget = sizes
    config = EngineConfig.from_kwargs(
        model="m",
        max_num_seqs=seats,
        max_num_batched_tokens=budget,
        max_model_len=6144,
        data_parallel_size=engines,
        enable_expert_parallel=True,
        enforce_eager=eager,
    )
    spec, exchange, others = dealt_out(few_layers(model), config.parallel), Exchange(Group(0, engines)), Others()
    with pretend(target_of(90)), list_kernels("NVIDIA H200") as found, torch.inference_mode():
        decoder = Decoder(spec, dtype=dtype, device=META, max_model_len=6144, exchange=exchange)
        runner = ModelRunner(decoder, config, META, 6144, team=Team(exchange=exchange, lockstep=others))
        runner.start(NUM_BLOCKS, 6144)
        with decoder.rehearsal():
            runner.warm_up().run()
            loaded = {described(kernel) for kernel in found}

            planned = steps(seats, budget, 6144, runner._may_share, config.block_tokens)

            @settings(max_examples=examples(40), deadline=None)
            @given(
                step=st.one_of(st.none(), planned, planned),
                elsewhere=st.lists(needs(seats, budget), min_size=engines - 1, max_size=engines - 1),
            )
            def launches_nothing_else(step, elsewhere):
                found.clear()
                others.needs = elsewhere
                runner.join() if step is None else runner.follow(step)
                assert {described(kernel) for kernel in found} <= loaded

            launches_nothing_else()


def placed(spec, ranks):
    loads = {place: tuple(range(count)) for place, count in spec.experts.items()}
    return by_expert(spec, rebalance(ExpertLoad(spec.architecture, loads), ranks, 2 * ranks))


@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize("model", ["llama-3.1-8b", *(name for name in VARIED if name.startswith("gpt-oss"))])
@pytest.mark.long
@pytest.mark.smoke  # with fewer examples
def test_no_step_of_a_stage_launches_what_the_start_has_not(model, stage):
    check_launches(model, 6144, "NVIDIA H200", pipe=Pipeline(stage, 3))


@pytest.mark.parametrize(("size", "length"), [(2, 6144), (8, 131072)])
@pytest.mark.long
@pytest.mark.smoke  # with fewer examples
def test_no_step_with_split_keys_launches_what_the_start_has_not(size, length):
    check_launches("llama, 2 key heads", length, "NVIDIA H200", ranks=2 * size, context=Group(size - 1, size))


def check_launches(
    model,
    length,
    gpu,
    deterministic=False,
    ranks=1,
    pipe=UNDIVIDED,
    context=ALONE,
    seats=64,
    budget=512,
    dtype=torch.bfloat16,
):
    """Arrivals, lengths and limits of any kind: what is launched is a function of what the warm-up visits."""
    spec = spec_from_config(MODELS[model]).without_repeats()
    counts = ranks > 1 and context.size == 1
    how = {"batch_invariant": deterministic, "group": Group(0, ranks), "counts_experts": counts, "context": context}
    spec = placed(spec, ranks) if counts else spec
    config = EngineConfig.from_kwargs(
        model="m",
        max_num_seqs=seats,
        max_num_batched_tokens=budget,
        max_model_len=length,
        deterministic=deterministic,
        tensor_parallel_size=ranks,
        decode_context_parallel_size=context.size,
    )
    with pretend(target_of(90)), list_kernels(gpu) as found, torch.inference_mode():
        stage = Stage(pipe.stage, range(spec.num_layers), first=pipe.first, last=pipe.last)
        sizes = {"dtype": dtype, "device": META, "max_model_len": length}
        decoder = Decoder(spec, **sizes, stage=stage, **how)
        runner = ModelRunner(decoder, config, META, length, team=Team(how["group"], pipe, context))
        runner.start(NUM_BLOCKS, length)
        with decoder.rehearsal():
            runner.warm_up().run()
            loaded = {described(kernel) for kernel in found}
            names = {kernel.name for kernel in found}
            assert ("_count_experts_kernel" in names, "_shard_kernel" in names) == (counts, ranks > 1)

            @settings(max_examples=examples(50), deadline=None)
            @given(step=steps(seats, budget, length, runner._may_share, config.block_tokens))
            def launches_nothing_else(step):
                found.clear()
                runner.follow(step)
                if pipe.stages > 1:
                    runner.follow(None)
                assert {described(kernel) for kernel in found} <= loaded

            launches_nothing_else()


def head_of(folder, method, target, length):
    """Of a model of 12 layers, of which ``target`` has one of each kind."""
    sizes = {"hidden_size": target.spec.hidden_size, "num_hidden_layers": 1, "vocab_size": target.spec.vocab_size}
    drafted = {"draft_vocab_size": target.spec.vocab_size // 4} if method == "eagle3" else {}
    (folder / "config.json").write_text(json.dumps({**MODELS[DRAFT], **sizes, **drafted}))
    return make_head(read_eagle_spec(folder, method, 12), target, bias=False, limit=length)


def few_layers(model):
    return spec_from_config(MODELS[model]).without_repeats()


@pytest.mark.parametrize(
    ("gpu", "length", "drafts", "draft"),
    [
        ("NVIDIA H200", 600, 1, None),
        ("NVIDIA H200", 6144, 4, None),
        (None, 600, 7, None),
        ("NVIDIA H200", 6144, 3, "draft_model"),
        (None, 600, 2, "draft_model"),
        ("NVIDIA H200", 600, 3, "eagle"),
        ("NVIDIA H200", 600, 3, "eagle3"),
        (None, 600, 2, "eagle3"),
        ("NVIDIA H200", 600, "[(0,), (1,), (0, 0), (0, 1)]", "draft_model"),
        ("NVIDIA H200", 600, "[(0,), (1,), (0, 0), (0, 1)]", "eagle3"),
    ],
)
@pytest.mark.parametrize("model", VARIED)
@pytest.mark.long
@pytest.mark.smoke  # with fewer examples
def test_no_step_with_drafts_launches_what_the_start_has_not(tmp_path, model, length, drafts, gpu, draft):
    """Any number of sequences with drafts (or a tree of them), of n-grams, a draft model or a head, and plain steps of
    an engine that has some."""
    check_drafts(tmp_path, model, length, drafts, gpu, draft)


@pytest.mark.long
@pytest.mark.smoke  # with fewer examples
def test_no_step_with_drafts_and_split_keys_launches_what_the_start_has_not(tmp_path):
    model, ranks = "llama, 2 key heads", {"ranks": 4, "context": Group(1, 2)}
    check_drafts(tmp_path, model, 600, 3, "NVIDIA H200", "draft_model", **ranks)


def check_drafts(folder, model, length, drafts, gpu, draft, ranks=1, context=ALONE):
    tree = drafts if isinstance(drafts, str) else None
    seats, drafts = 64, drafts if tree is None else tree.count("(")
    speculative = {"method": draft or "ngram", "num_speculative_tokens": drafts, "model": "small" if draft else None}
    speculative["speculative_token_tree"] = tree
    config = EngineConfig.from_kwargs(
        model="m",
        max_num_seqs=seats,
        max_num_batched_tokens=512,
        max_model_len=length,
        speculative_config=speculative,
        tensor_parallel_size=ranks,
        decode_context_parallel_size=context.size,
    )
    with pretend(target_of(90)), list_kernels(gpu) as found, torch.inference_mode():
        models = [few_layers(model), *([few_layers(DRAFT)] if draft == "draft_model" else [])]
        sizes, team = {"dtype": torch.bfloat16, "device": META, "max_model_len": length}, Team(Group(0, ranks))
        parts = [{"group": team.group, "context": context}, {}]  # a draft model is whole
        decoders = [Decoder(spec, **sizes, **part) for spec, part in zip(models, parts, strict=False)]
        if draft in OF_HEADS:
            decoders.append(head_of(folder, draft, decoders[0], length))
        team = team._replace(context=context)
        runner = ModelRunner(decoders[0], config, META, length, draft=decoders[1] if draft else None, team=team)
        runner.start(NUM_BLOCKS, length)
        with rehearsal_of(decoders):
            runner.warm_up().run()
            loaded = {described(kernel) for kernel in found}
            names = {kernel.name for kernel in found}
            assert {"_chain_kernel" if tree is None else "_tree_kernel", "_advance_seats_kernel"} < names
            assert ("_ngram_kernel" in names) == (draft is None)

            @settings(max_examples=examples(30), deadline=None)
            @given(
                n=st.integers(1, seats),
                keys=st.integers(1, length),
                kind=st.sampled_from(["verify", "verify", "decode", "mixed", "reported"]),
                chunk=st.integers(1, 512 - seats),
                logprobs=st.sampled_from([None, None, 2]),
                edited=st.booleans(),
            )
            def launches_nothing_else(n, keys, kind, chunk, logprobs, edited):
                found.clear()
                verify = {"drafts": drafts} if kind == "verify" else {}
                chunks = {"mixed": [5], "reported": [chunk]}.get(kind, []) if n < seats else []
                spans = chunks if kind == "reported" else []
                spans = tuple(PromptSpan("a", 1, n, np.zeros(length, dtype=np.int64), 1) for length in spans)
                width = -(-max(keys, *chunks, 1) // config.block_tokens) + 1
                step = dummy_step(n, chunks, rows=n, width=width, longest=keys, **verify)
                edits = np.arange(n, dtype=np.int32) if edited else None
                runner.run(dataclasses.replace(step, logprobs=logprobs, edited=edits, prompt_spans=spans))
                assert {described(kernel) for kernel in found} <= loaded

            launches_nothing_else()


@pytest.mark.parametrize("longest", [64, 4096, 40960])
def test_no_step_comes_twice(monkeypatch, longest):
    steps = []
    for name in ("prefill_step", "decode_step", "verify_step"):
        note = lambda self, *args, name=name, **options: steps.append((name, *args, *options.items()))  # noqa: E731
        monkeypatch.setattr(WarmUp, name, note)
    sizes = {"block_tokens": 16, "max_model_len": longest, "max_num_seqs": 256, "max_num_batched_tokens": 8192}
    regimes = Regimes(lambda sequences: 900 // sequences, longest)
    limits = StepLimits(**sizes, padded=[8448], drafts=4, verified=100)
    WarmUp(
        Work(None, None, None, lambda tokens: None, lambda: None, lambda sequences: True), limits, regimes, META
    ).run()
    assert len(steps) == len(set(steps)) > 50


@pytest.mark.parametrize(
    ("more", "deterministic", "expected"),
    [
        ({}, False, 8),  # steps without prompts: a token of each sequence
        ({"padded": (24, 72)}, False, 8 + 72),  # and the largest with prompts
        ({"padded": (24, 72)}, True, max(8, 8 * 100) + 72),
        ({"padded": (24,), "drafts": 3, "verified": 4}, False, max(8, 4 * 10) + 24),
        ({"padded": (24,), "drafts": 3, "verified": 4}, True, max(8, 4 * 10, 8 * 100) + 24),
    ],
)
def test_what_graphs_will_take_is_that_of_the_largest_steps_of_both_kinds(monkeypatch, more, deterministic, expected):
    class Counts(WarmUp):
        """A byte for a token, 10 for a sequence with drafts, and 100 for one of the longest."""

        def prefill_step(self, tokens, width=1, *, sample=True):
            self.bytes = tokens

        def decode_step(self, sequences, width=1, *, longest, **kind):
            assert longest == 4096
            self.bytes = 100 * sequences

        def verify_step(self, sequences, width):
            assert width == 1
            self.bytes = 10 * sequences

    sizes = {"block_tokens": 16, "max_model_len": 4096, "max_num_seqs": 8, "max_num_batched_tokens": 64}
    warm_up = Counts(None, StepLimits(**sizes, **more), None, META)
    monkeypatch.setattr("tritonllm.engine.step.warm_up.peak_bytes", lambda step, device: step() or warm_up.bytes)
    assert warm_up.captured_bytes(deterministic) == expected


@pytest.mark.parametrize("seats", [16, 256])
def test_precompiled_are_the_kernels_of_all_layers(seats):
    """Not only those of a model that is as small as its kinds of layers: what one layer leaves, the next one takes."""
    spec = spec_from_config(QWEN3_0_6B)
    config = EngineConfig.from_kwargs(model="m", max_num_seqs=seats, max_num_batched_tokens=512, max_model_len=LENGTH)
    target = Target(arch=90, name="NVIDIA H200", dtype=torch.bfloat16, max_model_len=LENGTH)
    precompiled = {described(kernel) for kernel in kernels_of(spec, config, target)}
    spec = dataclasses.replace(spec, layers=spec.layers[:4])
    with pretend(target_of(90)), list_kernels("NVIDIA H200") as found, torch.inference_mode():
        runner = ModelRunner(
            Decoder(spec, dtype=torch.bfloat16, device=META, max_model_len=LENGTH), config, META, LENGTH
        )
        runner.start(NUM_BLOCKS, LENGTH)
        runner.warm_up().run()
    assert {described(kernel) for kernel in found} == precompiled
