"""The only reader of ``os.environ``: every variable that changes behaviour, checked once at import.

``TRITON_INTERPRET``
    Triton's own: ``1`` runs kernels in its interpreter. Must be set before triton is imported.
``TRITONLLM_CPU_BACKEND``
    What an op does with CPU tensors: ``torch`` (plain torch, as fast as that is; the default), ``reference`` (what the
    kernels are tested against), ``interpret`` (the Triton kernel in the interpreter; implied by ``TRITON_INTERPRET=1``)
    or ``compile`` (compile the kernel for a GPU and launch nothing; for ahead-of-time checks, see
    :mod:`tritonllm.kernels.compile.aot`).
``TRITONLLM_API_KEY``
    What clients of ``tritonllm serve`` and ``tritonllm route`` must send, unless ``--api-key`` says it.
``TRITONLLM_BACKEND_API_KEY``
    What ``tritonllm route --backend URL`` sends to the backends in place of the client's key. A configuration file
    names a variable for each backend (``api_key_env``).
``GLOO_SOCKET_IFNAME``
    torch's own: the network device (``eth0``) by which ranks on other machines reach this one, where several might.
``TRITONLLM_RANKS_SECRET``
    What the ranks of a launcher on several machines prove to each other that they know (docs/operations.md).
``XDG_STATE_HOME``
    Where programs keep what outlasts a run: the tutorial's progress.
"""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, NamedTuple, cast

SHORTEST_SECRET = 24  # characters


class Launched(NamedTuple):
    """Which of its processes a launcher says this one is."""

    rank: int
    local_rank: int
    size: int


def launched() -> Launched | None:
    """What torchrun and its like set: ``RANK``, ``LOCAL_RANK`` and ``WORLD_SIZE``; ``None`` without them."""
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        return None
    rank = os.environ["RANK"]
    return Launched(int(rank), int(os.environ.get("LOCAL_RANK", rank)), int(os.environ["WORLD_SIZE"]))


def ranks_secret() -> bytes | None:
    """What ``TRITONLLM_RANKS_SECRET`` says, without blanks around it; ``None`` without it.

    Raises:
        ValueError: it is so short that who listens could guess it.
    """
    found = secret("TRITONLLM_RANKS_SECRET")
    if found is not None and len(found) < SHORTEST_SECRET:
        raise ValueError(
            f"TRITONLLM_RANKS_SECRET has {len(found)} characters, and must have {SHORTEST_SECRET} at least: "
            "`openssl rand -hex 32` makes one"
        )
    return None if found is None else found.encode()


def gloo_interface() -> str | None:
    """The network device that ``GLOO_SOCKET_IFNAME`` names, the first one if it lists several; ``None`` without it."""
    return os.environ.get("GLOO_SOCKET_IFNAME", "").partition(",")[0].strip() or None


def index_of_device(name: str) -> int:
    """The number that torch knows a GPU by, of the name that ``CUDA_VISIBLE_DEVICES`` has for it.

    Raises:
        ValueError: this process does not see it.
    """
    listed = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = None if listed is None else [each.strip() for each in listed.split(",")]
    if names is None and name.isdigit():
        return int(name)
    if names is None or name not in names:
        raise ValueError(f"CUDA_VISIBLE_DEVICES={listed} does not show GPU {name} to this process: add it")
    return names.index(name)


def leave_nccl_errors_to_us() -> None:
    """Keep torch from ending a process whose peer has died: no request would learn why."""
    os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
    # A warning of every rank that two ranks' messages go one after the other, as those of one way are to
    os.environ.setdefault("TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING", "0")


def share_metrics(folder: str) -> None:
    """Let prometheus_client count together with other processes, in those that are started from here on."""
    os.environ["PROMETHEUS_MULTIPROC_DIR"] = folder


def keep_cupti() -> None:
    """Let torch's profiler stay attached to the GPU between two of its uses; before the first."""
    os.environ.setdefault("TEARDOWN_CUPTI", "0")
    os.environ.setdefault("DISABLE_CUPTI_LAZY_REINIT", "1")


def secret(name: str) -> str | None:
    """A key that an operator keeps in a variable of their own choice, without blanks around it (a file ends with a line
    break); ``None`` if it is not set, or empty."""
    return os.environ.get(name, "").strip() or None


def state_folder() -> Path:
    """Where this package keeps what outlasts a run: below ``XDG_STATE_HOME``, or ``~/.local/state`` without it."""
    base = Path(os.environ.get("XDG_STATE_HOME", ""))
    if not base.is_absolute():  # a relative path is to be ignored, says the XDG Base Directory Specification
        base = Path.home() / ".local" / "state"
    return base / "tritonllm"


def of_interpreted_process() -> dict[str, str]:
    """The environment for a process that runs kernels in Triton's interpreter."""
    others = {name: value for name, value in os.environ.items() if name != "TRITONLLM_CPU_BACKEND"}
    return others | {"TRITON_INTERPRET": "1"}


def see_devices(indices: Sequence[int]) -> None:
    """Let CUDA, which has not begun in this process, show only these of the GPUs that it would show.

    Raises:
        ValueError: ``CUDA_VISIBLE_DEVICES`` names fewer.
    """
    listed = os.environ.get("CUDA_VISIBLE_DEVICES")
    if listed == "":
        return  # there is none to choose from
    if listed is None:
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, indices))
        return
    names = listed.split(",")
    if max(indices) >= len(names):
        raise ValueError(
            f"CUDA_VISIBLE_DEVICES={listed} names {len(names)} GPUs, and data_parallel_size times the ranks of an "
            f"engine are at least {max(indices) + 1}"
        )
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(names[index] for index in indices)


CpuBackend = Literal["torch", "reference", "interpret", "compile"]
IN_TORCH = ("torch", "reference")  # those that launch no kernel


def _flag(name: str) -> bool:
    value = os.environ.get(name, "0").lower()
    if value not in {"", "0", "1", "true", "false", "on", "off"}:
        raise ValueError(f"{name}={value!r}: expected 0 or 1")
    return value in {"1", "true", "on"}


def _cpu_backend(interpret: bool) -> CpuBackend:
    default = "interpret" if interpret else "torch"
    value = os.environ.get("TRITONLLM_CPU_BACKEND", default)
    if value not in {"torch", "reference", "interpret", "compile"}:
        raise ValueError(f"TRITONLLM_CPU_BACKEND={value!r}: expected torch, reference, interpret or compile")
    if (value == "interpret") != interpret:
        raise ValueError(f"TRITONLLM_CPU_BACKEND={value} contradicts TRITON_INTERPRET={int(interpret)}")
    return cast(CpuBackend, value)


TRITON_INTERPRET: bool = _flag("TRITON_INTERPRET")
CPU_BACKEND: CpuBackend = _cpu_backend(TRITON_INTERPRET)
API_KEY: str | None = os.environ.get("TRITONLLM_API_KEY") or None
BACKEND_API_KEY: str | None = os.environ.get("TRITONLLM_BACKEND_API_KEY") or None
