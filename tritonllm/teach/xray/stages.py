"""Watches one step of a model: which operations run in which stage, what they launch, why, and how long they take.

Four things are put around the model for the time of the step and taken away after it. Its modules' methods are
wrapped, so that it is known which one works. A dispatch mode sees every operation of torch and of ours. The tuning
tables tell what they were asked for, and Triton what it launches.
"""

import functools
import re
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from tritonllm.kernels.runtime import tuning
from tritonllm.moved import renamed
from tritonllm.teach.xray.costs import Cost, Later, cost_of, name_of
from tritonllm.teach.xray.kernels import Launch, reason_of, shapes_of, watched_launches

# Methods of our modules in which work is done; of other modules only `forward` is known.
METHODS = ("forward", "normalize", "normalize_over", "alone", "add_to", "add_and_normalize", "logits", "compute_logits")
# A path inside a layer of our decoder -> what the reader sees; other modules go by their own names.
STAGES = {
    "": "residual stream",
    "attention_norm": "norm",
    "attention.qkv": "qkv",
    "attention": "attention",
    "attention.q_norm": "attention",
    "attention.k_norm": "attention",
    "attention.v_norm": "attention",
    "attention.gate": "attention gate",
    "attention.o": "attention out",
    "attention_post_norm": "norm after attention",
    "mlp_norm": "norm before MLP",
    "mlp.up": "MLP up",
    "mlp.act": "activation",
    "mlp.down": "MLP down",
    "mlp.router": "router",
    "mlp": "experts",
    "mlp_post_norm": "norm after MLP",
    "input": "layer input",
    "input.gate": "layer input",
    "input.project": "layer input",
    "input.norm": "layer input",
    "layer_inputs": "layer inputs",
    "layer_inputs.table": "layer inputs",
    "layer_inputs.project": "layer inputs",
    "layer_inputs.norm": "layer inputs",
    "embed": "embedding",
    "embed.logits": "logits",
    "norm": "final norm",
    "lm_head": "logits",
    "base": "model",
    "head": "logits",
}
UNKNOWN = Cost(None, 0, 0)
BEFORE, MODEL, AFTER = "inputs", "model", "sampling"
_SILENT = re.compile(
    r"aten\.(empty|new_empty|detach|alias|lift_fresh|resolve_|_local_scalar|item|is_|sym_|set_|view|_unsafe_view"
    r"|split|chunk|unbind|unflatten|flatten|_has_same)"
)


@functools.cache
def is_silent(func: Any) -> bool:
    """Whether an operator launches nothing: an empty tensor, another view of one, a number for the host."""
    return _SILENT.match(str(func)) is not None


@dataclass
class Operation:
    """One call of an operator.

    Attributes:
        name: ``aten.linear`` or ``tritonllm.norm``.
        layer: the index of the layer; ``None`` outside of the layers.
        stage: the stage of the step that it is a part of.
        shapes: the shapes of its tensors, as text.
        choices: what it asked the tuning tables for.
        launches: the launches of Triton's kernels.
        reason: why this implementation.
        seconds: how long it took; 0 until the step is over.
        cost: how many bytes it moves and FLOPs it computes.
    """

    name: str
    layer: int | None
    stage: str
    shapes: str
    choices: tuple[tuning.ConfigChoice, ...]
    launches: tuple[Launch, ...]
    reason: str
    seconds: float
    cost: Cost

    @property
    def signature(self) -> tuple[Any, ...]:
        """Equal in layers that do the same."""
        return self.name, self.stage, self.shapes, tuple(launch.name for launch in self.launches), self.reason


class StageClock(Protocol):
    """Takes the times of operations, in which marks are opaque."""

    unit: str

    def start(self) -> Any: ...
    def mark(self) -> Any: ...
    def seconds(self, begin: Any, end: Any) -> float: ...
    def hold(self) -> None: ...
    def held(self) -> float: ...


class HostClock:
    """The clock of a CPU, where an operation is over when its call returns."""

    unit = "time.perf_counter on the CPU"

    def start(self) -> float:
        return self.mark()

    def mark(self) -> float:
        return time.perf_counter()

    def seconds(self, begin: float, end: float) -> float:
        return end - begin

    def hold(self) -> None:
        """Does nothing: there is nothing to wait for."""

    def held(self) -> float:
        return 0.0


class DeviceClock:
    """CUDA events. The host launches slower than the GPU works, the more so when it is watched: so before each layer
    the GPU turns in a loop until the layer's work is queued (:meth:`hold`), and what is timed is the GPU alone."""

    unit = "CUDA events"
    CYCLES = 20_000_000  # 10 ms at 2 GHz: watched, the host takes 1 to 3 ms for a layer

    def __init__(self) -> None:
        self._holds: list[tuple[Any, Any]] = []

    def start(self) -> Any:
        """The first mark, behind a hold."""
        torch.cuda._sleep(self.CYCLES)
        return self.mark()

    def mark(self) -> Any:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, begin: Any, end: Any) -> float:
        end.synchronize()
        return 1e-3 * begin.elapsed_time(end)

    def hold(self) -> None:
        begin = self.mark()
        torch.cuda._sleep(self.CYCLES)
        self._holds.append((begin, self.mark()))

    def held(self) -> float:
        """Seconds of all holds behind the start."""
        return sum(self.seconds(*hold) for hold in self._holds)


@dataclass(frozen=True)
class Recording:
    """A step that was watched.

    Attributes:
        operations: the operations, in their order.
        seconds: how long the whole step took, by the same clock.
        own: how much of that watching took; on a GPU it is not in ``seconds``.
        clock: which clock it was, in words.
        failures: operations that could not be counted, and why.
    """

    operations: list[Operation]
    seconds: float
    own: float
    clock: str
    failures: tuple[str, ...]

    @property
    def explained(self) -> float:
        return sum(operation.seconds for operation in self.operations)

    @property
    def rest(self) -> float:
        """How long the step took beside its operations and the watching, in seconds."""
        return max(0.0, self.seconds - self.explained - self.own)


class StageRecorder:
    """Watches one step, from :meth:`begin` to :meth:`end`.

    Args:
        model: the model of the engine.
        device: where it is.
    """

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self._clock: StageClock = DeviceClock() if device.type == "cuda" else HostClock()
        self._model = model
        self._stack: list[str] = []
        self._over = False  # the model has run
        self._own = 0.0  # seconds of the host, where they are a part of the step
        self._failures: list[str] = []
        self._found: list[tuple[Operation, Any, Any, Cost | Later]] = []
        self._open = ExitStack()
        self._layers = layers_of(model)
        self._places: dict[str, tuple[int | None, str]] = {}

    def begin(self) -> None:
        self._open.enter_context(inside(self._model, self._enter, self._leave))
        self._choices = self._open.enter_context(tuning.watched())
        self._launches = self._open.enter_context(watched_launches())
        self._open.enter_context(_OperationWatch(self._run))
        self._start = self._clock.start()

    def end(self) -> Recording:
        """The step is over, on the device too; takes everything away again."""
        try:
            end = self._clock.mark()
        finally:
            self.abandon()
        if self._found and isinstance(self._clock, DeviceClock):
            end = self._found[-1][2]  # the GPU has been idle since, and the host read the results
        operations = []
        for operation, begin, finish, cost in self._found:
            operation.seconds = self._clock.seconds(begin, finish)
            operation.cost = self._counted(operation.name, cost)
            operations.append(operation)
        whole = self._clock.seconds(self._start, end)
        return Recording(operations, whole - self._clock.held(), self._own, self._clock.unit, tuple(self._failures))

    def _counted(self, name: str, count: Cost | Later) -> Cost:
        try:
            return count if isinstance(count, Cost) else count()
        except Exception as error:
            self._failures.append(f"{name}: {type(error).__name__}: {error}")
            return UNKNOWN

    def abandon(self) -> None:
        """Take everything away; may be called twice."""
        self._open.close()

    def _enter(self, path: str, method: str) -> None:
        if (path in self._layers and path not in self._stack) or method == "compute_logits":
            self._clock.hold()
        self._stack.append(f"{path}.logits" if method in ("logits", "compute_logits") else path)

    def _leave(self) -> None:
        self._stack.pop()
        self._over = self._over or not self._stack

    def _place(self) -> tuple[int | None, str]:
        """The layer, and the stage."""
        if not self._stack:
            return None, AFTER if self._over else BEFORE
        path = self._stack[-1]
        if path not in self._places:
            self._places[path] = place_of(path, self._layers)
        return self._places[path]

    def _run(self, func: Any, args: Any, kwargs: Any) -> Any:
        if func.is_view or is_silent(func):
            return func(*args, **kwargs)
        came = time.perf_counter()
        asked, launched = len(self._choices), len(self._launches)
        begin = self._clock.mark()
        result = func(*args, **kwargs)
        end = self._clock.mark()
        try:
            self._note(func, args, kwargs, result, (asked, launched), (begin, end))
        except Exception as error:  # the step goes on: it is the user's, and not ours
            self._failures.append(f"{name_of(func)}: {type(error).__name__}: {error}")
        if isinstance(self._clock, HostClock):
            self._own += time.perf_counter() - came - self._clock.seconds(begin, end)
        return result

    def _note(
        self, func: Any, args: Any, kwargs: Any, result: Any, before: tuple[int, int], marks: tuple[Any, Any]
    ) -> None:
        name, (asked, launched) = name_of(func), before
        if name.endswith((".to", ".contiguous", ".reshape")) and result.data_ptr() == args[0].data_ptr():
            return  # there was nothing to do
        layer, stage = self._place()
        choices, launches = tuple(self._choices[asked:]), tuple(self._launches[launched:])
        reason = reason_of(func, args, kwargs, choices)
        shapes = shapes_of(func, args, kwargs, result)
        operation = Operation(name, layer, stage, shapes, choices, launches, reason, 0.0, UNKNOWN)
        cost: Cost | Later = UNKNOWN
        try:
            cost = cost_of(func, args, kwargs, result)
        finally:
            self._found.append((operation, *marks, cost))


class _OperationWatch(TorchDispatchMode):
    """Hands every operation of this thread to ``run``."""

    def __init__(self, run: Callable[[Any, Any, Any], Any]) -> None:
        super().__init__()
        self._run = run

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is traced here, so torch's compiler need not be imported

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._run(func, args, kwargs or {})


def layers_of(model: Any) -> dict[str, int]:
    """Paths of the model's layers: those of the first list of modules that is as long as the model is deep."""
    depth = model.spec.num_layers
    for path, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) == depth:
            return {f"{path}.{index}": index for index in range(len(module))}
    return {}


def place_of(path: str, layers: dict[str, int]) -> tuple[int | None, str]:
    """The layer that a module's path lies in, if it lies in one, and the stage that it is."""
    for layer, index in layers.items():
        if path == layer or path.startswith(f"{layer}."):
            inner = path[len(layer) + 1 :]
            return index, STAGES.get(inner, inner)
    if path.endswith(".logits"):
        return None, "logits"
    return None, STAGES.get(path, STAGES.get(path.split(".")[-1], path)) if path else MODEL


@contextmanager
def inside(model: nn.Module, enter: Callable[[str, str], None], leave: Callable[[], None]) -> Iterator[None]:
    """Inside the block, ``enter(path, method)`` and ``leave()`` are called around the methods of a model's modules."""
    changed: list[tuple[nn.Module, str, Any]] = []

    def wrapped(path: str, method: str, plain: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            enter(path, method)
            try:
                return plain(*args, **kwargs)
            finally:
                leave()

        return call

    try:
        for path, module in model.named_modules():
            ours = type(module).__module__.startswith("tritonllm.")
            for method in METHODS if ours else METHODS[:1]:
                if isinstance(module, nn.ModuleList) or not hasattr(type(module), method):
                    continue
                changed.append((module, method, module.__dict__.get(method)))
                setattr(module, method, wrapped(path, method, getattr(module, method)))
        yield
    finally:
        for module, method, before in reversed(changed):
            if before is None:
                delattr(module, method)
            else:
                setattr(module, method, before)


__getattr__ = renamed(__name__, {"Recorder": "StageRecorder"})  # names that the documents gave
