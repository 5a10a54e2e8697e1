"""Ranks that Ray starts, on one machine or on several (``distributed_executor_backend="ray"``, extra ``ray``).

Rank 0 is the process that makes the engine, a driver of Ray. A placement group holds a GPU for each rank, that of rank
0 on its own machine. The other ranks are actors: each follows the steps of rank 0 until that one's engine ends
(:class:`~tritonllm.engine.ranks.launched.LaunchedRanks`). Steps and tensors do not pass through Ray, but through
torch.distributed (gloo and NCCL), so a step costs what it costs under a launcher. Ray places the ranks, says at once
which one died, and ends all of them when the driver dies.
"""

import atexit
import logging
import multiprocessing.util
import os
import threading
import time
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

from tritonllm import env
from tritonllm.config.engine import EngineConfig
from tritonllm.dist.door import new_secret
from tritonllm.dist.ray_cluster import import_ray, join_cluster
from tritonllm.dist.watch import TICK, GroupFailure, Report
from tritonllm.engine.ranks.launched import LaunchedRanks
from tritonllm.engine.ranks.worker import report_of
from tritonllm.engine.start.resolve import resolve_device
from tritonllm.system.lost_hosts import break_connections

logger = logging.getLogger(__name__)
WISH = "distributed_executor_backend='ray'"
PLACES = 60.0  # seconds that Ray has to find room for the ranks
FAREWELL = 3.0  # seconds in which an actor ends by itself once it was told to


class Follower:
    """An actor: a rank other than the first."""

    def follow(self, config: EngineConfig, place: env.Launched, host: str, port: int, secret: bytes) -> Report:
        """Run the steps of rank 0 until it ends. Failures are told, not raised: Ray's wrapping hides the reason.

        Args:
            config: the configuration of the engine, as the user gave it.
            place: the place of this rank; Ray shows the process its own GPU only, as the first one.
            host, port: the address of the door behind which the ranks meet.
            secret: the secret that the door asks for. It came over Ray, as the rest did.
        """
        ready = False

        def started() -> None:
            nonlocal ready
            ready = True

        try:
            FollowingRanks(config, place, host, port, secret).follow(config, started)
            return Report(ready=True)
        except BaseException as error:
            return report_of(error, ready)


class FollowingRanks(LaunchedRanks):
    """What an actor sees of the ranks; ``host``, ``port`` and ``secret`` are of the door behind which they meet."""

    def __init__(self, config: EngineConfig, place: env.Launched, host: str, port: int, secret: bytes) -> None:
        super().__init__(config, place)
        self._door = host, port, secret

    def gather(self) -> tuple[Any, str]:
        store, own = self._enter(*self._door)
        store.set(_coming(self._place.rank), "")
        return store, own


def _coming(rank: int) -> str:
    return f"coming-{rank}"


class Followers:
    """The actors of an engine, and a thread that notices when one ends. The first failure ends all of them.

    Args:
        config: the configuration of the engine.
        size: the number of ranks, rank 0 among them.
        failure: is told what has gone wrong, once something has.

    Raises:
        ValueError: Ray has no room for the ranks.
    """

    def __init__(self, config: EngineConfig, size: int, failure: GroupFailure) -> None:
        self._ray = ray = join_cluster(WISH)
        self.failure = failure
        self._gpus = int(resolve_device(config.model.device).type == "cuda")
        self.host = ray.util.get_node_ip_address()
        each = {"CPU": 1, **({"GPU": 1} if self._gpus else {})}
        here = {**each, f"node:{self.host}": 0.001}
        self._group = ray.util.placement_group([here, *[each] * (size - 1)], strategy="PACK")
        if not self._group.wait(PLACES):
            ray.util.remove_placement_group(self._group)
            raise ValueError(
                f"{config.parallel.sizes}: within {PLACES:.0f} s Ray found no room for {size} ranks, each with "
                f"{' and '.join(f'{count} {name}' for name, count in each.items())}, the first one on this machine "
                f"({self.host}); free in the cluster: {_free(ray)}"
            )
        self._actors: dict[int, Any] = {}
        self._results: dict[Any, int] = {}  # of an actor's only task: its rank
        self._stopping = False
        self._watching: threading.Thread | None = None

    def gpu(self) -> int:
        """The number of the GPU that Ray keeps for rank 0, among those that this process sees."""
        if not self._gpus:
            return 0
        found = self._ray.remote(_own_gpu).options(**self._in_bundle(0)).remote()
        return env.index_of_device(self._ray.get(found))

    def begin(self, config: EngineConfig, size: int, port: int, secret: bytes) -> None:
        """Start them, and the watch."""
        actor = self._ray.remote(Follower)
        for rank in range(1, size):
            self._actors[rank] = actor.options(**self._in_bundle(rank), max_restarts=0).remote()
            place = env.Launched(rank, 0, size)
            self._results[self._actors[rank].follow.remote(config, place, self.host, port, secret)] = rank
        self._watching = threading.Thread(target=self._watch, name="tritonllm-ray-watch", daemon=True)
        self._watching.start()

    def _in_bundle(self, rank: int) -> dict[str, Any]:
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        bundle = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=rank)
        return {"num_cpus": 1, "num_gpus": self._gpus, "scheduling_strategy": bundle}

    def _watch(self) -> None:
        while not self._stopping:
            try:
                ended, _ = self._ray.wait(list(self._results), num_returns=1, timeout=TICK)
                if ended and not self._stopping:
                    time.sleep(TICK)  # the others fail of the first one: the reason is whose own fault it was
                    ended, _ = self._ray.wait(list(self._results), num_returns=len(self._results), timeout=0)
                    self._fail({self._results[result]: self._report(result) for result in ended})
                    return
            except (Exception, SystemExit) as error:  # Ray itself has ended
                if not self._stopping:
                    self._tell(f"Ray failed: {error}", False)
                return

    def _report(self, result: Any) -> Report:
        try:
            return self._ray.get(result)
        except Exception as error:
            return Report(f"its actor ended: {str(error).splitlines()[0]}")

    def _fail(self, reports: dict[int, Report]) -> None:
        rank = min(reports, key=lambda rank: (reports[rank].followed, rank))
        report = reports[rank]
        message = report.error or "it ended although nobody had told it to"
        if not report.invalid:
            message = f"rank {rank} (an actor of Ray) failed: {message}"
            logger.error("%s; the group ends with it", message)
        self._tell(message, report.invalid)

    def _tell(self, message: str, invalid: bool) -> None:
        self._kill()
        self.failure.tell(message, invalid)

    def _kill(self) -> None:
        for actor in self._actors.values():
            self._ray.kill(actor)

    def stop_watching(self) -> None:
        """What ends now was told to."""
        self._stopping = True

    def end(self) -> None:
        """End them, after a while in which they may do that themselves, and give their places back. Idempotent."""
        self._stopping = True
        if self._watching is not None and threading.current_thread() is not self._watching:
            self._watching.join(FAREWELL)  # what it asks of Ray behind Ray's end would begin Ray anew
        if not self._ray.is_initialized() or self._group is None:
            return
        if self._results and not self.failure.is_known:
            self._ray.wait(list(self._results), num_returns=len(self._results), timeout=FAREWELL)
        self._kill()
        self._ray.util.remove_placement_group(self._group)
        self._group = None


def _own_gpu() -> str:
    """A task of Ray: which GPU it was given."""
    import ray

    return str(ray.get_gpu_ids()[0])


def _free(ray: Any) -> str:
    free = ray.available_resources()
    return ", ".join(f"{free.get(name, 0):g} {name}" for name in ("CPU", "GPU"))


class RayRanks(LaunchedRanks):
    """Rank 0's view of ranks that Ray starts.

    Args:
        config: the configuration of the engine.
    """

    def __init__(self, config: EngineConfig) -> None:
        import_ray(WISH)
        self._config, self._size = config, config.parallel.world_size
        super().__init__(config, env.Launched(0, 0, self._size))
        self._followers_end: Callable[[], object] = lambda: None

    def begin(self) -> None:
        self._followers = followers = Followers(self._config, self._size, self.failure)
        # After the farewell to the ranks, whose priority is higher.
        self._followers_end = multiprocessing.util.Finalize(self, _end, args=(followers, os.getpid()), exitpriority=99)
        # At Python's end before Ray's own, which was registered earlier; that of multiprocessing comes behind it, and
        # what is asked of Ray there joins the cluster anew, which knows nothing of these actors.
        at_exit = partial(_end_before_ray, weakref.ref(self), os.getpid())
        atexit.register(at_exit)
        weakref.finalize(self, atexit.unregister, at_exit).atexit = False
        self.device_index = followers.gpu()
        secret = new_secret()
        followers.begin(self._config, self._size, self._open(followers.host, secret), secret)

    def gather(self) -> tuple[Any, str]:
        names = [_coming(rank) for rank in range(1, self._size)]
        while not self._store.check(names):
            self.failure.check()
            time.sleep(TICK / 4)
        return self._store, self._followers.host

    @staticmethod
    def _on_end(failure: GroupFailure, rank: int, host: str, error: OSError | None) -> None:
        """Ray says why a process has ended."""
        if error is None:
            return
        break_connections(host)
        if not failure.is_known:
            failure.tell(f"rank {rank} (an actor of Ray) failed: its host, {host}, is lost ({error})", False)

    def end(self) -> None:
        if hasattr(self, "_followers"):
            self._followers.stop_watching()
            self._hush()
            if self.failure.is_known:
                self._no_farewell()
        super().end()
        self._followers_end()


def _end_before_ray(ranks: "weakref.ref[RayRanks]", owner: int) -> None:
    if os.getpid() == owner and (mine := ranks()) is not None:
        mine.end()


def _end(followers: Followers, owner: int) -> None:
    if os.getpid() == owner:
        followers.end()
