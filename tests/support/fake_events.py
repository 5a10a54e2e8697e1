"""Events of an engine that does not exist, at chosen times."""

from tritonllm.events import NewTokens, Part, RequestAdded, RequestFinished, StepFinished, StepLaunched, StepPlanned


class FakeEngine:
    """Tells what it is told to tell."""

    def __init__(self):
        self.sinks = []

    def subscribe(self, sink):
        self.sinks.append(sink)
        return lambda: sink in self.sinks and self.sinks.remove(sink)

    def tell(self, *events):
        for event in events:
            for sink in list(self.sinks):
                sink(event)


def added(time, name, prompt=4):
    return RequestAdded(time, name, (name,), tuple(range(prompt)), None)


def part(name, kind="decode", start=4, tokens=1, prompt=4, admitted=False, drafts=0):
    return Part(name, name, kind, start, tokens, drafts, True, prompt, prompt, admitted, 0, (1, 2), 0)


def planned(time, step, parts, seconds=0.001, **more):
    facts = {
        "preempted": (),
        "copies": (),
        "stores": (),
        "loads": (),
        "token_budget": 64,
        "num_running": len(parts),
        "num_waiting": 0,
        "admission_end": "queue",
        "num_blocks": 64,
        "num_free_blocks": 60,
        "num_cached_blocks": 0,
        "evicted_blocks": 0,
        "idle": {},
        "kept_blocks": (),
    }
    return StepPlanned(time=time, seconds=seconds, step=step, parts=tuple(parts), **{**facts, **more})


def launched(time, step, seconds=0.001, late=False):
    return StepLaunched(time, seconds, step, late)


def finished(time, step, names, seconds=0.001, tokens=(7,), drafts=0, accepted=0):
    new = tuple(NewTokens(name, name, tokens, drafts, accepted) for name in names)
    return StepFinished(time, seconds, step, new, 0.0)


def ended(time, name, first, tokens, reason="length"):
    return RequestFinished(
        time=time,
        request_id=name,
        first_token_time=first,
        finish_reasons=(reason,),
        num_output_tokens=(tokens,),
        num_cached_tokens=0,
        num_preemptions=0,
        error=None,
        kept_blocks=(),
    )


def one_step(at, step, names, length=0.010, admitted=False):
    """Plan 1 ms, launch 1 ms, results after ``length`` seconds of the launch's begin."""
    parts = [part(name, admitted=admitted) for name in names]
    return planned(at + 0.001, step, parts), launched(at + 0.002, step), finished(at + 0.001 + length, step, names)
