"""Where one engine's weights and cache lie, so that the memory behind them can be given to others and filled anew.

A sleeping engine keeps its addresses and captured steps (:mod:`tritonllm.engine.cache.device_memory`).
"""

import dataclasses
import logging
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tritonllm.config.engine import ModelConfig
from tritonllm.dist.pipeline import ALONE, Team
from tritonllm.engine.cache.device_memory import Arena
from tritonllm.engine.data.asleep import AsleepError
from tritonllm.layers.linear import Embedding
from tritonllm.layers.moe import MoESpec
from tritonllm.models import checkpoint
from tritonllm.models.decoder import Decoder
from tritonllm.models.fallback import load_whole
from tritonllm.models.fallback_decoder import FallbackSpec, TransformersDecoder
from tritonllm.models.fallback_weights import differing_field
from tritonllm.models.loading import Writer, read_spec, stage_model, weight_writer
from tritonllm.models.spec import ModelSpec
from tritonllm.models.weights import dummy_weights

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
        limit: the longest sequence that may come; for models that run through transformers.
        team: the ranks that have a part of the model each.
    """

    def __init__(
        self,
        model: Any,
        config: ModelConfig,
        device: torch.device = CPU,
        enabled: bool = False,
        draft: Any = None,
        limit: int = 1,
        team: Team = ALONE,
    ) -> None:
        self._model, self._config, self._device = model, config, device
        self._limit, self._team = limit, team
        self.enabled = enabled
        self.weights_lost = False  # by a sleep of level 2
        self._writer: Writer | None = None
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
        if level == 2 and isinstance(self._model, Decoder) and self._model.quantization is not None:
            raise ValueError("level=2 drops weights, and narrow ones are made at the start only: level=1 keeps these")

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

        They are read and checked on the host before the first of the old ones is overwritten. All ranks call it.

        Raises:
            ValueError: no such model, another architecture, files that do not fit, here or on another rank; the old
                weights stay, everywhere.
            AsleepError: the weights sleep.
        """
        error: ValueError | OSError | None = None
        take: Callable[[], None] | None = None
        try:
            take = self._staged(model)
        except (ValueError, OSError) as wrong:
            error = wrong
        if not self._team.least(int(error is None)):
            raise error or ValueError("reload_weights: another rank cannot take them, and its log says why; all stay")
        assert take is not None
        take()
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self.weights_lost = False

    def check_weight(self, name: str, tensor: torch.Tensor) -> None:
        """Check that :meth:`load_weights` takes a weight. Raises as that."""
        self._writer_of("load_weights").check(name, tensor)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Overwrite weights, one by one, under the names of files or of transformers' memory. Each of several ranks is
        given whole tensors, and writes its part.

        Returns:
            The names.

        Raises:
            ValueError: a tensor that does not fit; those before it are written.
            AsleepError: the weights sleep.
        """
        writer, names = self._writer_of("load_weights"), set()
        for name, tensor in weights:
            writer.write(name, tensor)
            names.add(name)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        if self.weights_lost and writer.complete:
            self.weights_lost = False
        return names

    def _writer_of(self, what: str) -> Writer:
        model = self._writable(what)
        if self._writer is None:
            self._writer = weight_writer(model, allow_nan=self._config.allow_nan)
        return self._writer

    def _writable(self, what: str) -> Decoder | TransformersDecoder:
        """The model, whose weights may change.

        Raises:
            ValueError: its weights are kept.
            AsleepError: they sleep.
        """
        if WEIGHTS in self.asleep:
            raise AsleepError("the weights sleep: wake_up(tags=['weights']) first")
        if self._team.exchange.size > 1:
            raise ValueError(
                f"{what}: engines that share experts keep their weights; start anew, or with data_parallel_size=1"
            )
        assert isinstance(self._model, Decoder | TransformersDecoder)
        if isinstance(self._model, Decoder) and self._model.quantization is not None:
            raise ValueError(f"{what}: weights are made narrow at the start only: start an engine with the new ones")
        return self._model

    def _staged(self, model: str | None) -> Callable[[], None]:
        """Read and check new weights. What is returned takes them."""
        current, config = self._writable("reload_weights"), self._config
        made_up = config.load_format == "dummy" and model is None
        if isinstance(current, Decoder) and made_up and self._device.type == "cuda":
            return partial(dummy_weights, current, config.seed)  # a seed gives other values on the host
        name, revision = (config.model, config.revision) if model is None else (model, None)
        form = "auto" if config.load_format == "dummy" and model is not None else config.load_format
        folder = checkpoint.resolve(name, revision, load_format=form, download_dir=config.download_dir)
        how: dict[str, Any] = {"load_format": form, "seed": config.seed, "allow_nan": config.allow_nan}
        trusts, classifies = config.trust_remote_code, config.convert == "classify"
        spec = read_spec(folder, trust_remote_code=trusts, as_classifier=classifies, model_impl=config.model_impl)
        _check_same(current.whole, spec, folder)
        if isinstance(current, Decoder):
            staged = stage_model(folder, current, **how)
            if staged.kv_scales != current.kv_scales:
                raise _another(folder, "k_scale or v_scale")
            return partial(_take_all, current, staged)
        sizes: dict[str, Any] = {"dtype": current.dtype, "device": CPU, "max_model_len": self._limit}
        if form == "dummy" and current.is_whole:  # a seed gives other values on the host
            sizes["device"] = self._device
        whole = load_whole(folder, **sizes, trust_remote_code=trusts, **how)
        field = differing_field(current.head.config, whole.config)
        if field is not None:
            raise _another(folder, field)
        return partial(current.weights.take, whole)


def _check_same(current: ModelSpec | FallbackSpec, spec: Any, folder: Path) -> None:
    """Check that a checkpoint has the architecture and shape of the model that the engine runs.

    Raises:
        ValueError: a model of another architecture or shape; it names what differs.
    """
    if type(spec) is not type(current):
        raise ValueError(
            f"reload_weights: {folder} holds a {spec.architecture}, the engine runs a {current.architecture}"
        )
    ours, theirs = _as_read(current), _as_read(spec)
    for field in dataclasses.fields(current):
        if field.name not in ("eos_token_ids", "dtype") and getattr(theirs, field.name) != getattr(ours, field.name):
            raise _another(folder, field.name)


def _another(folder: Path, field: str) -> ValueError:
    return ValueError(f"reload_weights: {folder} describes another model: its {field} differs; start an engine for it")


def _as_read(spec: ModelSpec | FallbackSpec) -> ModelSpec | FallbackSpec:
    """A model as its configuration describes it, however ranks share its experts."""
    if isinstance(spec, FallbackSpec):
        return spec
    layers = [
        dataclasses.replace(layer, mlp=dataclasses.replace(layer.mlp, by_expert=False, slots=None, turns=1))
        if isinstance(layer.mlp, MoESpec)
        else layer
        for layer in spec.layers
    ]
    return dataclasses.replace(spec, layers=tuple(layers))


def _take_all(current: Decoder, staged: Decoder) -> None:
    for module, new in zip(current.modules(), staged.modules(), strict=True):
        _take(module, new)


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
