"""What a caller asks for becomes the state of a new request, once it is checked. Nothing is queued here."""

import itertools
import time

from tritonllm.config.beam_search_params import BeamSearchParams
from tritonllm.config.pooling_params import PoolingParams
from tritonllm.config.prompts import Prompt
from tritonllm.config.sampling_params import SamplingParams
from tritonllm.engine.data.outputs import RequestMetrics
from tritonllm.engine.loop.beam_search import beam_state
from tritonllm.engine.schedule.policy import SchedulingPolicy
from tritonllm.engine.schedule.scheduler import Scheduler
from tritonllm.engine.text.input_processor import InputProcessor, TokenizedPrompt
from tritonllm.engine.text.output_processor import RequestState, SequenceOutput
from tritonllm.engine.text.pooling import PoolingAbility, pooling_state


def check_call(request_id: object, priority: object, policy: SchedulingPolicy) -> None:
    """Check the arguments of a new request that do not depend on its prompt.

    Args:
        policy: the order of requests that the scheduler has.

    Raises:
        ValueError: a bad ``request_id`` or ``priority``.
    """
    if not isinstance(request_id, str):
        raise ValueError(f"request_id must be a string, got {request_id!r}")
    if not isinstance(priority, int) or isinstance(priority, bool):
        raise ValueError(f"priority must be an integer, got {priority!r}")
    if priority and not policy.uses_priority:
        raise ValueError(f"priority={priority} needs policy='priority'; this engine's requests run as they arrive")


class NewRequests:
    """Makes the states of one engine's new requests.

    Args:
        inputs: checks and tokenizes requests.
        pooling: what the model can pool.
        scheduler: says how wide a beam search may be.
    """

    def __init__(self, inputs: InputProcessor, pooling: PoolingAbility, scheduler: Scheduler) -> None:
        self._inputs, self._pooling, self._scheduler = inputs, pooling, scheduler
        self._arrivals = itertools.count()

    def state(
        self,
        request_id: str,
        prompt: Prompt | TokenizedPrompt,
        params: SamplingParams | BeamSearchParams | PoolingParams | None,
        priority: int,
    ) -> RequestState:
        """A request that has just arrived; arguments as of :meth:`LLMEngine.add_request`.

        Raises:
            ValueError: bad input, or what this model cannot do.
        """
        place = {"priority": priority, "arrival": next(self._arrivals)}
        if isinstance(params, PoolingParams):
            return pooling_state(self._pooling, self._inputs, request_id, prompt, params, **place)
        if self._pooling.refuses_generation is not None:
            raise ValueError(self._pooling.refuses_generation)
        if isinstance(params, BeamSearchParams):
            return beam_state(self._inputs, self._scheduler, request_id, prompt, params, **place)
        return self._generation(request_id, prompt, self._inputs.take_params(params), **place)

    def _generation(
        self, request_id: str, prompt: Prompt | TokenizedPrompt, params: SamplingParams, *, priority: int, arrival: int
    ) -> RequestState:
        inputs = self._inputs
        tokenized = inputs.tokenize(prompt, params.truncate_prompt_tokens)
        if tokenized.token_types is not None:
            raise ValueError("token_type_ids are for encoders: leave them out")
        grammar = inputs.grammar(params)
        requests = inputs.requests(request_id, tokenized, params, priority, arrival, grammar)
        sequences = [
            SequenceOutput(index, request, inputs.tokenizer, inputs.words, inputs.answer_text(tokenized, params))
            for index, request in enumerate(requests)
        ]
        metrics = RequestMetrics(arrival_time=time.monotonic())
        state = RequestState(request_id, tokenized.text, tokenized.token_ids, params, sequences, metrics)
        state.grammar = grammar
        return state
