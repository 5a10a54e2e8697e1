"""Whatever mix of requests, generated or pooled, aborts, priorities and memory pressure: each output is the one it
would have alone."""

from dataclasses import replace
from functools import cache

import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from support.engines import always_load, shallow_checkpoint, tiny_llm
from support.examples import examples
from support.tiny_models import random_tokens
from support.tiny_tokenizer import VOCAB_SIZE

from tritonllm import LLM, BeamSearchParams, PoolingParams, SamplingParams
from tritonllm.engine.text.input_processor import derive_seed

BLOCK_SIZE = 4
MAX_LEN = 52  # the longest prompt and output together need 50
# A few prompts that share beginnings, so that runs meet in the prefix cache.
STEM = random_tokens(24, VOCAB_SIZE, seed=0)
PROMPTS = [
    tuple(STEM[:cut] + random_tokens(extra, VOCAB_SIZE, seed=cut + extra)) for cut in (0, 9, 24) for extra in (1, 6)
]


@cache
def _alone_engine(seats: int = 1) -> LLM:
    return tiny_llm(
        shallow_checkpoint(), num_blocks=64, max_num_seqs=seats, max_model_len=MAX_LEN, enable_prefix_caching=False
    )


@cache
def alone(prompt: tuple[int, ...], params: SamplingParams) -> tuple[int, ...]:
    (output,) = _alone_engine().generate([list(prompt)], params, use_tqdm=False)
    return tuple(output.outputs[0].token_ids)


@cache
def beams(prompt: tuple[int, ...], params: BeamSearchParams) -> list[tuple[int, ...]]:
    (output,) = _alone_engine(params.beam_width).beam_search({"prompt_token_ids": list(prompt)}, params)
    return [tuple(sequence.tokens[len(prompt) :]) for sequence in output.sequences]


@cache
def pooled_alone(prompt: tuple[int, ...]) -> torch.Tensor:
    """A vector for each of its tokens."""
    params = PoolingParams(task="token_embed", normalize=False)
    (output,) = _alone_engine().encode([list(prompt)], params, use_tqdm=False)
    return output.outputs.data


WAYS = {"LAST": lambda vectors: vectors[-1], "CLS": lambda vectors: vectors[0], "MEAN": lambda vectors: vectors.mean(0)}


@cache
def params_of(max_tokens: int, temperature: float, seed: int) -> SamplingParams:
    """Every third seed comes with a penalty, which depends on all tokens before."""
    penalty = 0.5 if seed == 2 else 0.0
    return SamplingParams(
        max_tokens=max_tokens, temperature=temperature, seed=seed, frequency_penalty=penalty, ignore_eos=True
    )


class EngineMachine(RuleBasedStateMachine):
    @initialize(
        blocks=st.integers(13, 20),
        seats=st.integers(1, 6),
        budget=st.integers(6, 40),
        caching=st.booleans(),
        ahead=st.booleans(),
        offloaded=st.sampled_from([None, 0.000007, 0.001]),  # GiB: some blocks, or all that there can be
        way=st.sampled_from(sorted(WAYS)),
    )
    def start(self, blocks, seats, budget, caching, ahead, offloaded, way):
        self.way = way
        llm = tiny_llm(
            shallow_checkpoint(),
            num_blocks=blocks,
            max_model_len=MAX_LEN,
            max_num_seqs=seats,
            max_num_batched_tokens=budget,
            enable_prefix_caching=caching,
            policy="priority",
            async_scheduling=ahead,
            kv_offloading_size=offloaded,
            pooler_config={"pooling_type": way},
        )
        self.engine = (always_load(llm) if offloaded else llm).engine
        self.live = {}
        self.count = 0

    @rule(
        prompt=st.sampled_from(PROMPTS),
        max_tokens=st.sampled_from([1, 3, 20]),
        temperature=st.sampled_from([0.0, 1.0]),
        priority=st.integers(-1, 1),
        n=st.sampled_from([1, 1, 2, 4]),
    )
    def add(self, prompt, max_tokens, temperature, priority, n):
        self.count += 1
        params = params_of(max_tokens, temperature, self.count % 3)
        self.engine.add_request(f"r{self.count}", list(prompt), replace(params, n=n), priority=priority)
        seeds = [params.seed, *(derive_seed(params.seed, i) for i in range(1, n))]
        self.live[f"r{self.count}"] = prompt, [replace(params, seed=seed) for seed in seeds]

    @rule(prompt=st.sampled_from(PROMPTS), max_tokens=st.sampled_from([3, 14]), priority=st.integers(-1, 1))
    def search(self, prompt, max_tokens, priority):
        self.count += 1
        params = BeamSearchParams(2, max_tokens)
        try:
            self.engine.add_request(f"r{self.count}", list(prompt), params, priority=priority)
        except ValueError as error:
            assert "beam_width=2" in str(error)
        else:
            self.live[f"r{self.count}"] = prompt, params

    @rule(
        prompt=st.sampled_from(PROMPTS),
        task=st.sampled_from(["embed", "token_embed"]),
        priority=st.integers(-1, 1),
    )
    def pool(self, prompt, task, priority):
        self.count += 1
        params = PoolingParams(task=task, normalize=False)
        self.engine.add_request(f"r{self.count}", list(prompt), params, priority=priority)
        self.live[f"r{self.count}"] = prompt, params

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def abort(self, data):
        name = data.draw(st.sampled_from(sorted(self.live)))
        (output,) = self.engine.abort_request(name)
        assert output.finished
        prompt, params = self.live.pop(name)
        if isinstance(params, PoolingParams):
            assert output.error == "the request was aborted"
        elif not isinstance(params, BeamSearchParams):
            assert "abort" in {completion.finish_reason for completion in output.outputs}
            self.check_prefix(output, prompt, params)

    @rule(times=st.integers(1, 5))
    def step(self, times):
        for _ in range(times):
            self.take(self.engine.step())

    def take(self, outputs):
        for output in outputs:
            prompt, params = self.live[output.request_id]
            if isinstance(params, PoolingParams):
                self.check_pooled(output, prompt, params)
            elif isinstance(params, BeamSearchParams):
                assert [tuple(completion.token_ids) for completion in output.outputs] == beams(prompt, params)
            else:
                self.check_prefix(output, prompt, params)
            if output.finished:
                del self.live[output.request_id]

    def check_pooled(self, output, prompt, params):
        vectors = pooled_alone(prompt)
        expected = vectors if params.task == "token_embed" else WAYS[self.way](vectors)
        assert output.finished and output.error is None
        torch.testing.assert_close(output.outputs.data, expected, rtol=1e-4, atol=1e-4)

    def check_prefix(self, output, prompt, params):
        for completion, mine in zip(output.outputs, params, strict=True):
            tokens = tuple(completion.token_ids)
            assert tokens == alone(prompt, mine)[: len(tokens)]
            assert completion.finish_reason != "length" or len(tokens) == mine.max_tokens

    @invariant()
    def counts_agree(self):
        if hasattr(self, "engine"):
            stats = self.engine.stats
            assert stats.num_running + stats.num_waiting >= len(self.live)
            assert 0 <= stats.num_free_blocks <= stats.num_blocks

    def teardown(self):
        if not hasattr(self, "engine"):
            return
        for _ in range(2000):
            if not self.live:
                break
            self.take(self.engine.step())
        assert not self.live, "requests that never end"
        stats = self.engine.stats
        assert stats.num_free_blocks == stats.num_blocks
        assert not self.engine.has_unfinished_requests()


TestEngine = EngineMachine.TestCase
TestEngine.settings = settings(
    max_examples=examples(25), stateful_step_count=25, deadline=None, report_multiple_bugs=False
)
