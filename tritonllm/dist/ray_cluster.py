"""Ray, where a user asks for it (extra ``ray``)."""

import logging
from typing import Any

from tritonllm.system.extras import install


def import_ray(wish: str) -> Any:
    """Import the package ``ray``.

    Args:
        wish: the argument that asks for it.

    Raises:
        ValueError: Ray is not installed.
    """
    try:
        import ray
        import ray.util
    except ImportError as error:
        raise ValueError(f"{wish} needs Ray ({error}): {install('ray')}, or leave it out") from error
    return ray


def join_cluster(wish: str) -> Any:
    """The package, with this process a driver of the cluster in ``RAY_ADDRESS``, or of one that begins on this machine.
    Raises as :func:`import_ray`."""
    ray = import_ray(wish)
    if not ray.is_initialized():
        ray.init(log_to_driver=False, logging_level=logging.WARNING)
    return ray
