"""Short ways to set a scheduler going in tests."""

import zlib

from tritonllm.config.engine import SchedulerConfig
from tritonllm.config.sampling_params import SamplingParams
from tritonllm.engine.data.request import Request
from tritonllm.engine.schedule.scheduler import Scheduler
from tritonllm.engine.schedule.speculation import Drafting


def make_scheduler(
    num_blocks=100,
    *,
    block_size=4,
    seats=8,
    tokens=100,
    policy="fcfs",
    caching=True,
    max_model_len=1000,
    drafts=0,
    **limits,
):
    config = SchedulerConfig(max_num_seqs=seats, max_num_batched_tokens=tokens, policy=policy, **limits)
    sizes = block_size, num_blocks, max_model_len
    return Scheduler(config, *sizes, Drafting(drafts), enable_prefix_caching=caching)


def make(name, prompt, max_total_tokens=None, *, eos=(), priority=0, arrival=0, salt=None, **params):
    """A request; a number for the prompt means so many tokens that no other request shares."""
    if isinstance(prompt, int):
        prompt = [zlib.crc32(name.encode()) % 4_000_000 * 1000 + i for i in range(prompt)]
    return Request(
        name,
        prompt,
        SamplingParams(max_tokens=params.pop("max_tokens", None), **params),
        max_total_tokens=max_total_tokens or 1000,
        eos_token_ids=frozenset(eos),
        priority=priority,
        arrival=arrival,
        cache_salt=salt,
    )


def add(scheduler, *args, **kwargs):
    request = make(*args, **kwargs)
    scheduler.add(request)
    return request


def has_unfinished(scheduler):
    return scheduler.num_running + scheduler.num_waiting > 0


def step(scheduler, token=7):
    """One step in which every sampled token is `token`; returns the plan as {name: tokens in the step}."""
    plan = scheduler.schedule()
    scheduler.update(plan, [[token] if item.samples else [] for item in plan.scheduled])
    return {item.request.request_id: item.num_tokens for item in plan.scheduled}


def steps(scheduler, count):
    return [step(scheduler) for _ in range(count)]


def short_of_blocks(policy="fcfs", priorities=(0, 0, 0), **kwargs):
    """Requests a, b, c run with one full block each; the next step needs a block for each, and `hole` has them all."""
    scheduler = make_scheduler(10, policy=policy, **kwargs)
    requests = [
        add(scheduler, n, 4, priority=p, arrival=i) for i, (n, p) in enumerate(zip("abc", priorities, strict=True))
    ]
    step(scheduler)
    return scheduler, requests, scheduler.pool.allocate_many(scheduler.pool.num_free)
