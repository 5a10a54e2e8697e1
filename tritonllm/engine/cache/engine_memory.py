"""Where one engine's weights and cache lie, so that the memory behind them can be given to others and filled anew.

A sleeping engine keeps its addresses and captured steps (:mod:`tritonllm.engine.cache.device_memory`).
"""

import dataclasses
import logging
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tritonllm.config.engine import ModelConfig
from tritonllm.engine.cache.device_memory import Arena
from tritonllm.engine.data.asleep import AsleepError
from tritonllm.layers.linear import Embedding
from tritonllm.models import checkpoint
from tritonllm.models.decoder import Decoder
from tritonllm.models.loading import read_spec, stage_model
from tritonllm.models.spec import ModelSpec
from tritonllm.models.weights import WeightWriter, dummy_weights

logger = logging.getLogger(__name__)
CPU = torch.device("cpu")
WEIGHTS, KV_CACHE = "weights", "kv_cache"
TAGS = (WEIGHTS, KV_CACHE)
RETURN_BYTES = 1 << 30  # of torch's own memory that may lie free while weights move into the arena


class EngineMemory:
    """The weights and the cache of one engine.

    Args:
        model: the loaded model; with ``enabled`` its parameters move into an arena.
        config: the configuration that the model was loaded from.
        device: the device that the model is on.
        enabled: whether the engine can sleep (``enable_sleep_mode``).
        draft: the draft model, if there is one. Its weights are always kept, since nobody reloads them.
        ranks: how many ranks have a part of the model each.
    """

    def __init__(
        self,
        model: Any,
        config: ModelConfig,
        device: torch.device = CPU,
        enabled: bool = False,
        draft: Any = None,
        ranks: int = 1,
    ) -> None:
        self._model, self._config, self._device = model, config, device
        self._ranks = ranks
        self.enabled = enabled
        self.weights_lost = False  # by a sleep of level 2
        self._writer: WeightWriter | None = None
        self._arenas: dict[str, list[Arena]] = {tag: [] for tag in TAGS}
        if enabled:  # the model's own first
            self._arenas[WEIGHTS] = [self._move_weights(one) for one in (model, draft) if one is not None]

    def _move_weights(self, model: Any) -> Arena:
        """Give each parameter a place in an arena, one after the other, so that few of them lie twice in memory."""
        parameters = [p for p in model.parameters() if p.layout is torch.strided and p.is_contiguous()]
        arena, moved = Arena(Arena.room(parameters), self._device), 0
        for parameter in parameters:
            place = arena.empty(parameter.shape, parameter.dtype)
            parameter.data = place.copy_(parameter.data)
            moved += place.numel() * place.element_size()
            if self._device.type == "cuda" and moved > RETURN_BYTES:
                torch.cuda.empty_cache()
                moved = 0
        return arena

    def zeros(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Memory of a cache."""
        if not self.enabled:
            return torch.zeros(tuple(shape), dtype=dtype, device=self._device)
        room = Arena.room([torch.empty(tuple(shape), dtype=dtype, device="meta")])
        arena = Arena(room, self._device)
        self._arenas[KV_CACHE].append(arena)
        return arena.empty(shape, dtype).zero_()

    @property
    def mapped(self) -> dict[str, int]:
        """Bytes of memory behind each."""
        return {tag: sum(arena.mapped for arena in arenas) for tag, arenas in self._arenas.items()}

    @property
    def asleep(self) -> list[str]:
        """The tags that sleep."""
        return [tag for tag, arenas in self._arenas.items() if any(arena.is_asleep for arena in arenas)]

    def check_usable(self) -> None:
        """Check that the engine can run steps.

        Raises:
            AsleepError: something sleeps, or the weights are gone.
        """
        if self.asleep:
            raise AsleepError(f"the engine sleeps ({', '.join(self.asleep)}): wake it up with wake_up()")
        if self.weights_lost:
            raise AsleepError("the weights were dropped by sleep(level=2): load all of them, or use reload_weights()")

    def check_level(self, level: int) -> None:
        """Check that the engine can sleep at this level.

        Raises:
            ValueError: the engine cannot sleep, or there is no such level.
        """
        if not self.enabled:
            raise ValueError("this engine cannot sleep: make it with enable_sleep_mode=True (--enable-sleep-mode)")
        if level not in (1, 2) or isinstance(level, bool):
            raise ValueError(f"level must be 1 (keep the weights on the host) or 2 (drop them), got {level!r}")

    def sleep(self, level: int) -> None:
        """Give the device's memory back: of the weights (level 1 keeps them on the host, level 2 drops them) and of the
        cache.

        Raises:
            RuntimeError, MemoryError: the host has no room for the weights; these stay where they are.
        """
        before = sum(self.mapped.values())
        weights, *others = self._arenas[WEIGHTS]
        lost = self.weights_lost or (level == 2 and not weights.is_asleep)
        try:
            for arena in others:
                arena.sleep(keep=True)
            weights.sleep(keep=not lost)
        except BaseException:
            for arena in others:
                arena.wake_up()
            raise
        if lost and not self.weights_lost and self._writer is not None:
            self._writer.forget()
        self.weights_lost = lost
        for arena in self._arenas[KV_CACHE]:
            arena.sleep(keep=False)
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
        logger.info("asleep at level %d: %.2f GB were given back", level, (before - sum(self.mapped.values())) / 1e9)

    def wake_up(self, tags: Collection[str] | None) -> None:
        """Map what sleeps again: the weights, the cache, or both.

        Raises:
            ValueError: there is no such tag.
            MemoryError: the device has not enough memory now; what could not wake up sleeps on.
        """
        wanted = TAGS if tags is None else [tags] if isinstance(tags, str) else tags
        for tag in wanted:
            if tag not in TAGS:
                raise ValueError(f"tags must be some of {', '.join(TAGS)}, got {tag!r}")
        for tag in TAGS:
            for arena in self._arenas[tag] if tag in wanted else ():
                arena.wake_up()
        if not self.asleep:
            logger.info("awake")

    @torch.no_grad()
    def reload_weights(self, model: str | None) -> None:
        """Take the weights of a folder or hub id with the same architecture, or read the engine's own again.

        They are read and checked on the host before the first of the old ones is overwritten.

        Raises:
            ValueError: no such model, another architecture, files that do not fit; the old weights stay.
            AsleepError: the weights sleep.
        """
        model_here, config = self._writable("reload_weights"), self._config
        if config.load_format == "dummy" and model is None and self._device.type == "cuda":
            dummy_weights(model_here, config.seed)  # a seed gives other values on the host
        else:
            name, revision = (config.model, config.revision) if model is None else (model, None)
            form = "auto" if config.load_format == "dummy" and model is not None else config.load_format
            kept_in = config.download_dir
            self._replace(checkpoint.resolve(name, revision, load_format=form, download_dir=kept_in), form)
        self.weights_lost = False

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Overwrite weights, one by one, under their checkpoint names.

        Returns:
            The names.

        Raises:
            ValueError: a tensor that does not fit; those before it are written.
            AsleepError: the weights sleep.
        """
        model = self._writable("load_weights")
        if self._writer is None:
            self._writer = WeightWriter(model, allow_nan=self._config.allow_nan)
        names = set()
        for name, tensor in weights:
            self._writer.write(name, tensor)
            names.add(name)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        if self.weights_lost and self._writer.complete:
            self.weights_lost = False
        return names

    def _writable(self, what: str) -> Decoder:
        """The model, whose weights may change.

        Raises:
            ValueError: its weights are kept.
            AsleepError: they sleep.
        """
        if WEIGHTS in self.asleep:
            raise AsleepError("the weights sleep: wake_up(tags=['weights']) first")
        if self._ranks > 1:
            raise ValueError(
                f"{what}: the weights of {self._ranks} ranks are kept; start anew, or with one rank "
                "(tensor_parallel_size=1, pipeline_parallel_size=1; data_parallel_size=1, if engines share experts)"
            )
        if not isinstance(self._model, Decoder):
            raise ValueError(f"{what}: a model that runs through transformers keeps its weights; start anew")
        if self._model.group.size > 1:
            raise ValueError(f"{what}: several ranks keep their weights (tensor_parallel_size); start anew")
        return self._model

    def _replace(self, folder: Path, load_format: str) -> None:
        config, current = self._config, self._model
        spec = read_spec(folder, as_classifier=config.convert == "classify")
        _check_same(current.spec, spec, folder)
        staged = stage_model(folder, current, load_format=load_format, seed=config.seed, allow_nan=config.allow_nan)
        for module, new in zip(current.modules(), staged.modules(), strict=True):
            _take(module, new)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def _check_same(current: ModelSpec, spec: Any, folder: Path) -> None:
    """Check that a checkpoint has the architecture and shape of the model that the engine runs.

    Raises:
        ValueError: a model of another architecture or shape; it names what differs.
    """
    if type(spec) is not type(current):
        raise ValueError(
            f"reload_weights: {folder} holds a {spec.architecture}, the engine runs a {current.architecture}"
        )
    for field in dataclasses.fields(current):
        if field.name not in ("eos_token_ids", "dtype") and getattr(spec, field.name) != getattr(current, field.name):
            raise ValueError(
                f"reload_weights: {folder} describes another model: its {field.name} differs; start an engine for it"
            )


def _take(module: nn.Module, new: nn.Module) -> None:
    """Overwrite a module's own weights, in place where captured steps hold addresses."""
    for name, parameter in module.named_parameters(recurse=False):
        value = new.get_parameter(name)
        if parameter.layout is torch.strided:
            parameter.copy_(value)
        else:  # of oneDNN, on the CPU, where nothing is captured
            setattr(module, name, value)
    if isinstance(module, Embedding) and isinstance(new, Embedding):
        module.take_pack(new)
