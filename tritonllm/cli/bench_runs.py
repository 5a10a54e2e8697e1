"""The runs of ``tritonllm bench``: random requests through an engine, and what they took.

Everything is timed on the host, from the call that brings the requests to the last token.
"""

import argparse
import random
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

PERCENTILES = (10, 25, 50, 75, 90, 99)


@dataclass(frozen=True)
class BenchRequest:
    prompt: list[int]
    output_len: int


@dataclass(frozen=True)
class Timed:
    """A call of ``generate``: its seconds and its outputs."""

    seconds: float
    outputs: Sequence[Any]

    @property
    def prompt_tokens(self) -> int:
        return sum(len(output.prompt_token_ids) for output in self.outputs)

    @property
    def generated_tokens(self) -> int:
        return sum(len(output.outputs[0].token_ids) for output in self.outputs)

    @property
    def cached_tokens(self) -> int:
        return sum(output.num_cached_tokens for output in self.outputs)

    def first_token_ms(self) -> list[float]:
        times = [output.metrics for output in self.outputs]
        return [1e3 * (at.first_token_time - at.arrival_time) for at in times]

    def per_token_ms(self) -> list[float]:
        """Milliseconds for each token after the first, of the requests that have more than one token."""
        counted = [(output.metrics, len(output.outputs[0].token_ids) - 1) for output in self.outputs]
        return [1e3 * (at.finished_time - at.first_token_time) / more for at, more in counted if more]


class Bench:
    """A started engine and a source of random prompts.

    Args:
        llm: the engine.
        vocab_size: the size of the model's vocabulary.
        temperature: the temperature of all requests.
        seed: the seed of the prompts.
    """

    def __init__(self, llm: Any, vocab_size: int, temperature: float, seed: int) -> None:
        self._llm, self._vocab_size, self._temperature = llm, vocab_size, temperature
        self._random = random.Random(seed)

    def tokens(self, count: int) -> list[int]:
        return self._random.choices(range(self._vocab_size), k=count)

    def vary(self, length: int, ratio: float) -> int:
        return max(1, self._random.randint(round(length * (1 - ratio)), round(length * (1 + ratio))))

    def batch(self, count: int, prompt: int, output: int, beginning: Sequence[int] = ()) -> list[BenchRequest]:
        return [BenchRequest([*beginning, *self.tokens(prompt)], output) for _ in range(count)]

    def run(self, requests: Iterable[BenchRequest]) -> Timed:
        """Time some requests.

        Raises:
            ValueError: an output did not get the length that was asked for, so its time says nothing.
        """
        from tritonllm.config.sampling_params import SamplingParams

        batch = list(requests)
        common: dict[str, Any] = {"temperature": self._temperature, "ignore_eos": True, "detokenize": False}
        params = [SamplingParams(max_tokens=request.output_len, **common) for request in batch]
        prompts = [{"prompt_token_ids": request.prompt} for request in batch]
        begin = time.perf_counter()
        outputs = self._llm.generate(prompts, params, use_tqdm=False)
        done = Timed(time.perf_counter() - begin, outputs)
        for request, output in zip(batch, outputs, strict=True):
            came = len(output.outputs[0].token_ids)
            if output.error is not None or came != request.output_len:
                raise ValueError(
                    f"an output has {came} tokens instead of {request.output_len}, behind a prompt of "
                    f"{len(request.prompt)}: {output.error or 'raise --max-model-len, or ask for less'}"
                )
        return done


def percentiles(values: Sequence[float]) -> dict[str, float]:
    """Percentiles of some values, with linear interpolation, as numpy computes them."""
    ordered, found = sorted(values), {}
    for percent in PERCENTILES:
        at = (len(ordered) - 1) * percent / 100
        low = min(int(at), len(ordered) - 1)
        high = min(low + 1, len(ordered) - 1)
        found[str(percent)] = ordered[low] + (at - low) * (ordered[high] - ordered[low])
    return found


def spread(values: Sequence[float]) -> dict[str, Any] | None:
    """Mean and percentiles; ``None`` of nothing."""
    return {"mean": statistics.fmean(values), "percentiles": percentiles(values)} if values else None


def rates(done: Timed) -> dict[str, Any]:
    tokens = done.prompt_tokens + done.generated_tokens
    return {
        "elapsed_time": done.seconds,
        "num_requests": len(done.outputs),
        "prompt_tokens": done.prompt_tokens,
        "output_tokens": done.generated_tokens,
        "total_num_tokens": tokens,
        "requests_per_second": len(done.outputs) / done.seconds,
        "output_tokens_per_second": done.generated_tokens / done.seconds,
        "tokens_per_second": tokens / done.seconds,
        "time_to_first_token_ms": spread(done.first_token_ms()),
        "time_per_output_token_ms": spread(done.per_token_ms()),
    }


def throughput(bench: Bench, args: argparse.Namespace) -> dict[str, Any]:
    ratio = args.random_range_ratio
    requests = [
        BenchRequest(bench.tokens(bench.vary(args.input_len, ratio)), bench.vary(args.output_len, ratio))
        for _ in range(args.num_prompts)
    ]
    return rates(bench.run(requests))


def latency(bench: Bench, args: argparse.Namespace) -> dict[str, Any]:
    runs = [
        bench.run(bench.batch(args.batch_size, args.input_len, args.output_len))
        for _ in range(args.num_iters_warmup + args.num_iters)
    ][args.num_iters_warmup :]
    seconds = [run.seconds for run in runs]
    return {
        "avg_latency": statistics.fmean(seconds),
        "latencies": seconds,
        "percentiles": percentiles(seconds),
        "time_to_first_token_ms": spread([ms for run in runs for ms in run.first_token_ms()]),
        "time_per_output_token_ms": spread([ms for run in runs for ms in run.per_token_ms()]),
    }


def prefix(bench: Bench, args: argparse.Namespace) -> dict[str, Any]:
    beginning = bench.tokens(args.prefix_len)
    cold, *warm = (
        bench.run(bench.batch(args.num_prompts, args.input_len, args.output_len, beginning))
        for _ in range(1 + args.repeat_count)
    )
    median = sorted(warm, key=lambda run: run.seconds)[len(warm) // 2]
    return {
        name: rates(run) | {"cached_tokens": run.cached_tokens, "cached_share": run.cached_tokens / run.prompt_tokens}
        for name, run in (("cold", cold), ("warm", median))
    }


def prefill(bench: Bench, args: argparse.Namespace) -> dict[str, Any]:
    done = bench.run(bench.batch(args.num_prompts, args.input_len, 1))
    return rates(done) | {"prompt_tokens_per_second": done.prompt_tokens / done.seconds}


KINDS: dict[str, Callable[[Bench, argparse.Namespace], dict[str, Any]]] = {
    "throughput": throughput,
    "latency": latency,
    "prefix": prefix,
    "prefill": prefill,
}
