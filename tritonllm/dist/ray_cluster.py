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


TOKEN = (
    "a cluster that asks for a token lets nobody in without it: set RAY_AUTH_MODE=token here, and the cluster's token "
    "in RAY_AUTH_TOKEN or ~/.ray/auth_token"
)


def join_cluster(wish: str) -> Any:
    """The package, with this process a driver of the cluster in ``RAY_ADDRESS``, or of one that begins on this machine.

    Raises:
        ValueError: Ray is not installed, or this process has no token where ``RAY_AUTH_MODE`` says so.
        ConnectionError: the cluster is not there, or refuses this process's token.
    """
    ray = import_ray(wish)
    if ray.is_initialized():
        return ray
    missing = getattr(ray.exceptions, "AuthenticationError", ())  # from 2.52 on
    try:
        ray.init(log_to_driver=False, logging_level=logging.WARNING)
    except missing:
        raise ValueError(f"{wish} finds no token of Ray, and RAY_AUTH_MODE wants one: {TOKEN}") from None
    except ConnectionError as error:
        raise ConnectionError(f"{wish}: {error} ({TOKEN})") from error
    return ray
