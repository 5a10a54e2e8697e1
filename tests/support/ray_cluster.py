"""Two nodes of Ray on this machine, each a raylet with processes of its own."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import psutil


@contextmanager
def two_nodes(cpus: int = 1) -> Iterator[Any]:
    """By default of one core each, so that two things that need one are on both of them. This process is the driver."""
    import ray
    from ray.cluster_utils import Cluster

    # Ray ends workers when the machine is short of memory, by which it means files that were read, too: other tests'
    settings = {"memory_monitor_refresh_ms": 0}
    head = {"num_cpus": cpus, "include_dashboard": False, "_system_config": settings}
    made = Cluster(initialize_head=True, head_node_args=head)
    try:
        made.add_node(num_cpus=cpus)
        made.wait_for_nodes()
        ray.init(address=made.address, log_to_driver=False)
        yield made
    finally:
        ray.shutdown()
        made.shutdown()


def all_free() -> bool:
    """Nobody holds a core of the nodes."""
    import ray

    gc.collect()
    return ray.available_resources().get("CPU", 0) == 2


def actors(name: str) -> list[psutil.Process]:
    """Processes of actors of a class, of the nodes that this process has started."""
    found = []
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            words = " ".join(process.cmdline())
            if words.startswith("ray::") and name in words:
                found.append(process)
    return found
