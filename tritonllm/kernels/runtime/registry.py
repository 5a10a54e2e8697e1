"""Registers each kernel launcher as a torch operator: CUDA takes Triton, the CPU takes the reference.

A launcher writes into tensors its caller allocated and returns nothing, so an operator is only mutation: no aliasing
rules to break, a trivial fake implementation, and ``torch.compile(fullgraph=True)`` never looks inside. The public
function beside it checks its arguments and allocates the output; both are ordinary Python that Dynamo traces.

A raw ``torch.library.Library`` costs 1.2 to 2.1 us a call, ``torch.library.custom_op`` 8 to 22 us (measured on the
CPU, torch 2.13): at 300 kernels a step that is the difference between hidden and not.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.library import Library, infer_schema

from tritonllm import env
from tritonllm.kernels.runtime.stable_names import hash_callees_first

hash_callees_first()  # every kernel's module imports this one

NAMESPACE = "tritonllm"
_LIBRARY = Library(NAMESPACE, "FRAGMENT")
OPS: dict[str, Any] = {}
LAUNCHERS: dict[Any, Callable[..., None]] = {}  # of each operator


def _no_output(*args: Any, **kwargs: Any) -> None:
    return None


def register_op(*, mutates: tuple[str, ...], reference: Callable[..., None]) -> Callable[[Callable[..., None]], Any]:
    """Decorate a launcher ``_name(...) -> None`` and get the operator ``torch.ops.tritonllm.name``.

    Args:
        mutates: names of the arguments the launcher writes.
        reference: plain-torch function with the launcher's signature that writes the same results; the CPU path.

    The launcher needs full type annotations (the operator's schema is inferred from them).
    """

    def decorate(launch: Callable[..., None]) -> Any:
        name = launch.__name__.lstrip("_")
        _LIBRARY.define(name + infer_schema(launch, mutates_args=mutates))
        _LIBRARY.impl(name, launch, "CUDA")
        _LIBRARY.impl(name, reference if env.CPU_BACKEND == "reference" else launch, "CPU")
        torch.library.register_fake(f"{NAMESPACE}::{name}", _no_output, lib=_LIBRARY)
        OPS[name] = getattr(getattr(torch.ops, NAMESPACE), name).default
        LAUNCHERS[OPS[name]] = launch
        return OPS[name]

    return decorate
