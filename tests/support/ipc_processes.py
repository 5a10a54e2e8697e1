"""Engines with the connector ``CudaIpc``, each in a process of its own, which does what the test tells it."""

import multiprocessing
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

from support.engines import always_load, greedy
from support.ipc_memory import Host
from support.waiting import PATIENCE


class Engine:
    """An engine in a process.

    Args:
        role: its connector's.
        gpu: which GPU it is on; ``None``: the CPU, with shared memory in place of a GPU's.
        arguments: of ``LLM``.
        settings: of the connector.
    """

    def __init__(self, role: str, gpu: int | None, arguments: dict[str, Any], settings: dict[str, Any]) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, other = context.Pipe()
        transfer = {"kv_connector": "CudaIpc", "kv_role": role, "kv_connector_extra_config": settings}
        given = {**arguments, "kv_transfer_config": transfer}
        # not a daemon: on a GPU an engine has children of its own, which compile
        self.process = context.Process(target=_run, args=(gpu, given, other))
        self.process.start()
        other.close()

    def ask(self, name: str, *arguments: Any) -> Any:
        """What it answers.

        Raises:
            AssertionError: it has failed, or hangs.
        """
        self._pipe.send((name, arguments))
        assert self._pipe.poll(PATIENCE), "it hangs"
        kind, value = self._pipe.recv()
        assert kind == "done", value
        return value

    def prefill(self, prompts: list[list[int]]) -> list[dict[str, Any]]:
        """What its answers say of where the prompts' blocks are, once all are kept."""
        return self.ask("prefill", prompts)

    def decode(
        self, prompts: list[list[int]], offers: list[dict[str, Any]], max_tokens: int
    ) -> tuple[list[list[int]], list[int]]:
        """Tokens behind the prompts, and how many tokens of each were not computed."""
        return self.ask("decode", prompts, offers, max_tokens)

    def kill(self) -> None:
        self.process.kill()
        self.process.join(PATIENCE)
        self._pipe.close()


@contextmanager
def processes() -> Iterator[list[Engine]]:
    """A list for engines that are to be ended at last."""
    made: list[Engine] = []
    try:
        yield made
    finally:
        for one in made:
            one.kill()


def _run(gpu: int | None, given: dict[str, Any], pipe: Connection) -> None:
    try:
        llm = _start(gpu, given)
        while True:
            name, arguments = pipe.recv()
            pipe.send(("done", _answer(llm, name, *arguments)))
    except EOFError:
        return
    except Exception as error:  # told to the test, which raises it
        pipe.send(("failed", repr(error)))


def _start(gpu: int | None, given: dict[str, Any]) -> Any:
    import torch

    from tritonllm import LLM
    from tritonllm.engine.transfer import settings as kv_settings

    if gpu is None:
        torch.set_num_threads(1)
        host = Host()
        kv_settings.load_cuda = lambda: host.device  # type: ignore[assignment]
    else:
        torch.cuda.set_device(gpu)
    return always_load(LLM(**given))


def _reset(llm: Any) -> None:
    """Steps that were launched ahead may hold blocks still."""
    for _ in range(100):
        if llm.reset_prefix_cache():
            return
        llm.engine.step()
    raise AssertionError("a request runs")


def _answer(llm: Any, name: str, *arguments: Any) -> Any:
    engine = llm.engine
    if name == "stats":
        return {key: getattr(engine.stats, key) for key in ("kv_saved_blocks", "kv_fetched_blocks", "kv_missed_blocks")}
    if name == "opened":  # pieces of others' memory
        return len(engine._transfer.connector._plane._opened._opened)
    if name == "reset":
        return _reset(llm)
    if name == "prefill":
        (prompts,) = arguments
        first = greedy(1, extra_args={"kv_transfer_params": {"do_remote_decode": True}})
        outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], first, use_tqdm=False)
        return [output.kv_transfer_params for output in outputs]
    prompts, offers, max_tokens = arguments
    wishes = [greedy(max_tokens, extra_args={"kv_transfer_params": offer}) for offer in offers]
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], wishes, use_tqdm=False)
    return [list(out.outputs[0].token_ids) for out in outputs], [out.num_cached_tokens for out in outputs]
