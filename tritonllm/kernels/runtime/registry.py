"""Registers each kernel launcher as a torch operator: CUDA takes Triton, the CPU takes plain torch.

On the CPU that is the reference, which says what is computed as plainly as it can; or, for an operation where that is
slow, a function of its own beside it (``cpu=``; :mod:`tritonllm.kernels.attention.cpu` and its like).

A launcher writes into tensors its caller allocated and returns nothing, so an operator is only mutation: no aliasing
rules to break, a trivial fake implementation, and ``torch.compile(fullgraph=True)`` never looks inside. The public
function beside it checks its arguments and allocates the output; both are ordinary Python that Dynamo traces.

An argument list is written once. Launcher and reference take the same; arguments that belong together, above all
options that stay the same for a layer or a step, are one ``NamedTuple``, whose fields the operator takes one by one. A
public function's twin ``<name>_ref`` has no list: it is that function :func:`with_reference`.

A raw ``torch.library.Library`` costs 1.2 to 2.1 us a call, ``torch.library.custom_op`` 8 to 22 us (measured on the
CPU, torch 2.13): at 300 kernels a step that is the difference between hidden and not.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar, get_args, get_origin, get_type_hints

import torch
from torch.library import Library, infer_schema
from torch.utils._python_dispatch import TorchDispatchMode

from tritonllm import env

NAMESPACE = "tritonllm"
_LIBRARY = Library(NAMESPACE, "FRAGMENT")
OPS: dict[str, Any] = {}
LAUNCHERS: dict[Any, Callable[..., None]] = {}  # of each operator
REFERENCES: dict[Any, Callable[..., None]] = {}
CPU_PATHS: dict[Any, Callable[..., bool]] = {}  # of the operators that have one beside the reference
P = ParamSpec("P")
R = TypeVar("R")


def _no_output(*args: Any, **kwargs: Any) -> None:
    return None


def _flattened(launch: Callable[..., None]) -> tuple[inspect.Signature, Callable[[Callable[..., Any]], Any]]:
    """An operator's own arguments, and what makes a function that takes those of ``launch`` take them instead."""
    kinds = get_type_hints(launch)
    flat: dict[str, Any] = {}
    groups: dict[str, type] = {}
    given = []
    for name in inspect.signature(launch).parameters:
        kind = kinds[name]
        of_kind = _fields_of(kind)
        fields = {name: kind} if of_kind is None else of_kind
        if flat.keys() & fields.keys():
            raise TypeError(f"{launch.__name__}: two arguments are named {min(flat.keys() & fields.keys())}")
        if of_kind is not None:
            groups[f"_{name}"] = get_origin(kind) or kind
        given.append(name if of_kind is None else f"new(_{name}, ({', '.join(fields)},))")
        flat |= fields
    parameters = [inspect.Parameter(n, inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=t) for n, t in flat.items()]

    def grouping(function: Callable[..., Any]) -> Any:
        if not groups:
            return function
        # compiled for its arguments, and without a NamedTuple's own constructor: 0.2 us a group, with loops 0.6
        source = f"lambda {', '.join(flat)}: function({', '.join(given)})"
        return eval(source, {"function": function, "new": tuple.__new__, **groups})

    return inspect.Signature(parameters, return_annotation=None), grouping


def _fields_of(kind: Any) -> dict[str, Any] | None:
    """The fields of a ``NamedTuple`` with their types, of a generic one for the types that it is given; ``None`` of
    anything else."""
    group = get_origin(kind) or kind
    if not (isinstance(group, type) and issubclass(group, tuple) and hasattr(group, "_fields")):
        return None
    of = dict(zip(getattr(group, "__parameters__", ()), get_args(kind), strict=True))
    hints = get_type_hints(group)
    return {name: _with_types(hint, of) for name, hint in hints.items()}


def _with_types(hint: Any, of: dict[Any, Any]) -> Any:
    """A type with its variables replaced."""
    variables = getattr(hint, "__parameters__", ())
    return hint[tuple(of[one] for one in variables)] if variables else of.get(hint, hint)


def _on_its_device(launcher: Callable[..., None], signature: inspect.Signature) -> Callable[..., None]:
    """The launcher where its tensors are: Triton launches on the current device, which may be another (0.2 us)."""
    kinds = [parameter.annotation for parameter in signature.parameters.values()]
    place = kinds.index(torch.Tensor)  # of the first tensor

    def launch(*args: Any) -> None:
        device = args[place].device
        if device.index == torch.cuda.current_device():
            launcher(*args)
        else:
            with torch.cuda.device(device):
                launcher(*args)

    return launch


def _in_torch(reference: Callable[..., None], fast: Callable[..., bool] | None) -> Callable[..., None]:
    """What the CPU runs: ``fast`` where there is one and it takes the arguments, else the reference."""
    if fast is None or env.CPU_BACKEND == "reference":
        return reference

    def on_cpu(*args: Any) -> None:
        if not fast(*args):
            reference(*args)

    return on_cpu


def register_op(
    *, mutates: tuple[str, ...], reference: Callable[..., None], cpu: Callable[..., bool] | None = None
) -> Callable[[Callable[..., None]], Any]:
    """Decorate a launcher ``_name(...) -> None`` and get the operator ``torch.ops.tritonllm.name``.

    Args:
        mutates: names of the arguments the launcher writes.
        reference: plain-torch function with the launcher's arguments that writes the same results; the CPU path. It may
            call public functions: their references run then.
        cpu: a faster one, for the CPU. It returns True, or False before it has written anything: then it does not take
            these arguments, and the reference runs.

    The launcher needs full type annotations (the operator's schema is inferred from them). Some of its arguments may be
    NamedTuples: the operator takes their fields one by one, ``_name(x, *options)``, launcher and reference as a whole.
    """

    def decorate(launch: Callable[..., None]) -> Any:
        name = launch.__name__.lstrip("_")
        signature, grouping = _flattened(launch)
        launcher, plain, on_cpu = grouping(launch), grouping(reference), grouping(_in_torch(reference, cpu))
        prototype: Any = lambda: None  # noqa: E731 (infer_schema asks a function for its signature)
        prototype.__signature__ = signature
        _LIBRARY.define(name + infer_schema(prototype, mutates_args=mutates))
        _LIBRARY.impl(name, _on_its_device(launcher, signature), "CUDA")
        _LIBRARY.impl(name, on_cpu if env.CPU_BACKEND in env.IN_TORCH else launcher, "CPU")
        torch.library.register_fake(f"{NAMESPACE}::{name}", _no_output, lib=_LIBRARY)
        OPS[name] = getattr(getattr(torch.ops, NAMESPACE), name).default
        LAUNCHERS[OPS[name]] = launcher
        REFERENCES[OPS[name]] = plain
        if cpu is not None:
            CPU_PATHS[OPS[name]] = grouping(cpu)
        return OPS[name]

    return decorate


def runs_in_torch(x: torch.Tensor) -> bool:
    """Operations on ``x`` are plain torch, and no compiler is tracing.

    Then a layer, whose tensors fit in every step, may call the CPU's functions themselves. To check arguments and call
    an operator costs as much as a row's arithmetic: of a norm of 576 elements 16 us of 29.
    """
    return x.is_cpu and env.CPU_BACKEND == "torch" and not torch.compiler.is_compiling()


class _References(TorchDispatchMode):
    """Inside the context, and in the thread that entered it, our operators run their references on any device.

    A mode, because PyTorch asks for one before anything else is called: without one, nothing is asked.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is traced here, so torch's compiler need not be imported

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        reference = REFERENCES.get(func)
        if reference is None:
            return func(*args, **(kwargs or {}))
        with self:  # for the operators that the reference calls
            return reference(*args, **(kwargs or {}))


def with_reference(public: Callable[P, R]) -> Callable[P, R]:
    """The twin ``<name>_ref`` of a public function: the same function while operators run their references."""

    @functools.wraps(public)
    def reference(*args: P.args, **kwargs: P.kwargs) -> R:
        with _References():
            return public(*args, **kwargs)

    reference.__name__ = reference.__qualname__ = f"{public.__name__}_ref"
    reference.__doc__ = f"The reference of :func:`{public.__name__}`, in plain torch.\n\n{inspect.getdoc(public)}"
    return reference
