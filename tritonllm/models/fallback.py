"""Any other decoder-only model: transformers computes it, our kernels do its attention over the paged cache.

For architectures that no family describes. Projections, norms, rotations and experts are transformers' own code, one
operation after the other and without CUDA graphs, so this is slower; batching, chunked prefill and the cache are the
engine's. A model is refused unless a probe at loading shows that it can be served so (:class:`TransformersDecoder`).

Loading is transformers' too: the whole model passes through host memory.
"""

import copy
import inspect
import pickle
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from tritonllm.dist.group import ALONE, Group
from tritonllm.models import checkpoint
from tritonllm.models.config_reader import ConfigReader
from tritonllm.models.fallback_attention import PAGED, register
from tritonllm.models.fallback_decoder import FallbackSpec, TransformersDecoder, refused
from tritonllm.models.fallback_files import check_files, check_tied
from tritonllm.models.fallback_shards import sharing_of
from tritonllm.models.fallback_stages import stages_in
from tritonllm.models.finite import not_finite, refuse
from tritonllm.models.formats.registry import quantization_of
from tritonllm.models.stages import Stage

CPU = torch.device("cpu")

_SAFETENSORS = {"auto": None, "safetensors": True, "pt": False}  # transformers' name of our load formats
_LAYER_TYPES = {"full_attention", "sliding_attention", "chunked_attention"}
_OTHER_SENSES = ("vision_config", "audio_config", "speech_config", "image_config", "video_config")


def fallback_spec(folder: Path, trust_remote_code: bool = False) -> FallbackSpec:
    """Read a checkpoint's configuration and refuse what can be refused without its weights.

    Raises:
        ValueError: an encoder, encoder-decoder or multimodal model, a quantized checkpoint, an architecture unknown to
            transformers (or known only to code in the checkpoint, which runs only with ``trust_remote_code``), code
            that cannot be imported, an architecture whose attention cannot be replaced, or a bad field.
    """
    raw = checkpoint.read_config(folder)
    config = _read_config(folder, raw, trust_remote_code)
    name = _architecture(raw)
    _check_kind(name, raw, config)
    _check_attention(name, config, _model_class(name, raw, config, trust_remote_code))
    return _spec(name, raw, config)


def _spec(name: str, raw: dict[str, Any], config: Any) -> FallbackSpec:
    names = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings")
    optional = ("num_key_value_heads", "head_dim", "eos_token_id")
    try:
        reader = ConfigReader({field: getattr(config, field, None) for field in (*names, *optional)})
    except RuntimeError as error:  # how transformers reports a field that differs between layers
        raise refused(name, str(error)) from error
    num_heads = reader.size("num_attention_heads")
    return FallbackSpec(
        architecture=name,
        vocab_size=reader.size("vocab_size"),
        hidden_size=reader.size("hidden_size"),
        num_layers=reader.size("num_hidden_layers"),
        num_kv_heads=reader.size_or("num_key_value_heads", num_heads),
        head_size=reader.size_or("head_dim", reader.size("hidden_size") // num_heads),
        max_position_embeddings=reader.size("max_position_embeddings"),
        eos_token_ids=reader.token_ids("eos_token_id"),
        dtype=ConfigReader(raw).dtype(),
    )


def _architecture(raw: dict[str, Any]) -> str:
    return (raw.get("architectures") or [str(raw.get("model_type"))])[0]


@contextmanager
def _explained(folder: Path, otherwise: str) -> Iterator[None]:
    """Errors of transformers, or of the checkpoint's code that it imports, as a ValueError that names the folder."""
    from huggingface_hub.errors import StrictDataclassError

    try:
        yield
    except ImportError as error:
        raise ValueError(
            f"{folder}: the checkpoint's code cannot be imported; install the packages that it needs: {error}"
        ) from error
    except SyntaxError as error:
        raise ValueError(
            f"{folder}: the checkpoint's code is not Python that can run here ({error}); download it again"
        ) from error
    except (ValueError, TypeError, LookupError, AttributeError, NameError, OSError, StrictDataclassError) as error:
        raise ValueError(f"{otherwise}: {error}") from error


def _read_config(folder: Path, raw: dict[str, Any], trust_remote_code: bool) -> Any:
    import transformers

    name = _architecture(raw)
    auto_map = raw.get("auto_map")
    if auto_map is not None and not isinstance(auto_map, dict):
        raise ValueError(f"{folder / 'config.json'}: auto_map must be an object, got {auto_map!r}")
    if int(transformers.__version__.split(".")[0]) < 5:  # before, masks depended on how positions were packed
        raise refused(name, f"that needs transformers 5, this is {transformers.__version__}")
    if raw.get("model_type") not in transformers.CONFIG_MAPPING and not trust_remote_code:
        if auto_map:
            raise refused(name, "its code is in the checkpoint; trust_remote_code=True would run it")
        raise refused(
            name, f"transformers {transformers.__version__} does not know model_type={raw.get('model_type')!r}"
        )
    with _explained(folder, f"{folder / 'config.json'} is not a configuration of {name}"):
        return transformers.AutoConfig.from_pretrained(
            folder, trust_remote_code=trust_remote_code, local_files_only=True
        )


def _check_kind(name: str, raw: dict[str, Any], config: Any) -> None:
    if quantization_of(raw) is not None:
        raise refused(name, "the checkpoint is quantized")
    if config.is_encoder_decoder:
        raise refused(name, "it is an encoder-decoder model; only decoder-only models are supported")
    if config.get_text_config() is not config or any(field in raw for field in _OTHER_SENSES):
        raise refused(name, "it is a multimodal model; only text models are supported")


def _model_class(name: str, raw: dict[str, Any], config: Any, trust_remote_code: bool) -> Any:
    """The class that transformers' AutoModelForCausalLM takes."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING
    from transformers.dynamic_module_utils import get_class_from_dynamic_module

    remote = (raw.get("auto_map") or {}).get("AutoModelForCausalLM")
    if remote is not None and trust_remote_code:
        folder = Path(config.name_or_path)
        with _explained(folder, f"{folder}: the checkpoint has no {remote!r}, which its auto_map names"):
            return get_class_from_dynamic_module(remote, config.name_or_path, local_files_only=True)
    found: Any = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    if found is None or (raw.get("architectures") and found.__name__ not in raw["architectures"]):
        raise refused(name, "it is not a causal language model")
    return found


def _check_attention(name: str, config: Any, model_class: Any) -> None:
    others = sorted(set(getattr(config, "layer_types", None) or ()) - _LAYER_TYPES)
    if others or model_class._is_stateful:
        kinds = ", ".join(others) or "it keeps another state"
        raise refused(name, f"its layers must attend to keys and values of the tokens, all or a window ({kinds})")
    if not model_class._supports_attention_backend:
        raise refused(
            name,
            "its attention does not go through transformers' attention interface (ALiBi does not, nor do older models)",
        )
    if "position_ids" not in inspect.signature(model_class.forward).parameters:
        raise refused(name, "its forward does not take position_ids")


def check_rope(config: Any, max_model_len: int) -> None:
    """Refuse rotations that change with the longest position of a batch.

    Transformers computes dynamic NTK and longrope frequencies anew when a sequence passes the trained length, for the
    whole batch. Keys in the cache keep the rotation they were stored with, so a sequence that crosses that length would
    mix two, and so would the others in its batch. Up to that length the frequencies are fixed.

    Raises:
        ValueError: ``max_model_len`` is beyond the length up to which the rotation stays.
    """
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    for kind in [rope, *(part for part in rope.values() if isinstance(part, dict))]:
        rope_type = kind.get("rope_type", kind.get("type")) or ""
        limit = config.max_position_embeddings
        if rope_type == "longrope":
            limit = kind.get("original_max_position_embeddings") or config.original_max_position_embeddings
        elif "dynamic" not in rope_type:
            continue
        if max_model_len > limit:
            raise ValueError(
                f"{type(config).__name__}: rope type {rope_type} changes once a sequence passes {limit} tokens, which "
                f"keys in the cache cannot follow: set max_model_len={limit} or lower"
            )


def load_fallback(
    folder: Path,
    spec: FallbackSpec,
    *,
    dtype: torch.dtype,
    device: torch.device,
    trust_remote_code: bool,
    load_format: str,
    seed: int,
    max_model_len: int,
    allow_nan: bool = False,
    group: Group = ALONE,
    stage: Stage | None = None,
    batch_invariant: bool = False,
) -> TransformersDecoder:
    """Load a model and check that it can be served. Each of several ranks loads all of it on the host, and keeps its
    part.

    Args:
        folder: the checkpoint.
        spec: what :func:`fallback_spec` said.
        dtype: the dtype of the weights and of the cache.
        load_format: which files, as in :func:`~tritonllm.models.weights.load_weights`; ``dummy`` makes weights up
            from ``seed`` as transformers initialises them.
        max_model_len: the longest sequence that may come.
        allow_nan: take weights that are NaN or infinite.
        group: the ranks that share the model, or the stage.
        stage: which layers, of :func:`fallback_stages`; all of them by default.
        batch_invariant: as of :class:`TransformersDecoder`.

    Raises:
        ValueError: files that are absent, damaged or quantized, weights that do not match the configuration (the
            message names a tensor), a value in ``config.json`` that transformers does not know, or a model that the
            probe refuses.
    """
    one = group.size == 1 and (stage is None or (stage.first and stage.last))
    lm = load_whole(
        folder,
        dtype=dtype,
        device=device if one else CPU,
        trust_remote_code=trust_remote_code,
        load_format=load_format,
        seed=seed,
        max_model_len=max_model_len,
        allow_nan=allow_nan,
    )
    how: dict[str, Any] = {"device": device, "group": group, "stage": stage, "batch_invariant": batch_invariant}
    decoder = TransformersDecoder(lm, spec, dtype=dtype, max_model_len=max_model_len, **how)
    graphs = "" if decoder.supports_graphs else " and takes no CUDA graphs"
    warnings.warn(
        f"{spec.architecture} does not run natively: transformers computes it, with our attention. This is "
        f"slower{graphs}; see docs/models.md",
        stacklevel=2,
    )
    return decoder


def load_whole(
    folder: Path,
    *,
    dtype: torch.dtype,
    device: torch.device,
    trust_remote_code: bool,
    load_format: str,
    seed: int,
    max_model_len: int,
    allow_nan: bool,
) -> Any:
    """The model of transformers with its weights; arguments and errors as of :func:`load_fallback`."""
    config = _configured(folder, trust_remote_code)
    check_rope(config, max_model_len)
    settings = {"dtype": dtype, "attn_implementation": PAGED, "trust_remote_code": trust_remote_code}
    if load_format == "dummy":
        with torch.random.fork_rng([device] if device.type == "cuda" else []), device:
            torch.manual_seed(seed)
            return _build(folder, config, settings).eval().requires_grad_(False)
    lm = _load(folder, config, settings, load_format).to(device)
    parameters = dict(lm.named_parameters())
    if not allow_nan and (bad := not_finite(parameters)):
        refuse(f"{folder}: ", ((name, parameters[name]) for name in parameters if name in bad))
    return lm.requires_grad_(False)


def fallback_stages(
    folder: Path, spec: FallbackSpec, ranks: int, stages: int, trust_remote_code: bool = False
) -> list[Stage]:
    """Check that a model can be cut, before its weights are read, and deal its layers out to stages.

    Args:
        ranks: how many share each stage.

    Raises:
        ValueError: the model cannot be cut so; the message names the argument and the reason.
    """
    if ranks == stages == 1:
        return [Stage(0, range(spec.num_layers))]
    config = _configured(folder, trust_remote_code)
    settings = {"dtype": spec.dtype, "attn_implementation": PAGED, "trust_remote_code": trust_remote_code}
    with torch.device("meta"):
        lm = _build(folder, config, settings)
    if ranks > 1:
        sharing_of(lm, spec.architecture, ranks, head_size=spec.head_size, num_kv_heads=spec.num_kv_heads)
    return stages_in(lm, spec.architecture, spec.num_layers, stages)


def _configured(folder: Path, trust_remote_code: bool) -> Any:
    """The configuration, without what would make a model collect what nobody reads."""
    register()
    config = _read_config(folder, checkpoint.read_config(folder), trust_remote_code)
    for collects in ("output_attentions", "output_hidden_states", "output_router_logits"):
        if getattr(config, collects, False):
            setattr(config, collects, False)
    return config


def _build(folder: Path, config: Any, settings: dict[str, Any]) -> Any:
    """The model with the weights that transformers initialises, on the device of the context."""
    from transformers import AutoModelForCausalLM

    try:  # with a copy, because the model writes into its configuration
        return AutoModelForCausalLM.from_config(copy.deepcopy(config), **settings)
    except (ValueError, LookupError, TypeError, AttributeError, ImportError) as error:
        raise _unbuilt(folder, error) from error


def _unbuilt(folder: Path, error: Exception) -> ValueError:
    """What to say where transformers stops: the field of ``config.json``, if its value is what a table lacks."""
    if isinstance(error, KeyError) and error.args:
        for field, value in _fields(checkpoint.read_config(folder)):
            if value == error.args[0]:
                return ValueError(f"{folder / 'config.json'}: transformers does not know {field}={value!r}")
    return ValueError(
        f"{folder}: transformers cannot load the model that config.json describes ({type(error).__name__}: {error}); "
        "check config.json, or download the checkpoint again"
    )


def _fields(config: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """The fields of a configuration and of the objects in it, which come with a dot in their names."""
    for name, value in config.items():
        if isinstance(value, dict):
            yield from ((f"{name}.{inner}", part) for inner, part in _fields(value))
        else:
            yield name, value


def _load(folder: Path, config: Any, settings: dict[str, Any], load_format: str) -> Any:
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM

    def empty_model() -> Any:
        with torch.device("meta"):
            return _build(folder, config, settings)

    check_files(folder, load_format, empty_model)
    auto: Any = AutoModelForCausalLM  # its annotations do not know output_loading_info
    try:
        lm, info = auto.from_pretrained(
            folder,
            config=config,
            local_files_only=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # they are reported, and by name
            use_safetensors=_SAFETENSORS[load_format],
            **settings,
        )
    except (pickle.UnpicklingError, EOFError) as error:  # without its message, which advises to run what is in a file
        raise ValueError(
            f"{folder}: a file of weights is damaged or holds more than tensors: download it again"
        ) from error
    except (OSError, SafetensorError, RuntimeError, ValueError) as error:
        raise ValueError(f"{folder}: the weights cannot be loaded: {error}") from error
    except (LookupError, TypeError, AttributeError, ImportError) as error:
        raise _unbuilt(folder, error) from error
    for what, keys in (
        ("is missing", sorted(info["missing_keys"])),
        ("has no place in the model that config.json describes", sorted(info["unexpected_keys"])),
        ("has a shape other than config.json asks for", sorted(key[0] for key in info["mismatched_keys"])),
    ):
        if keys:
            others = f" (and {len(keys) - 1} more)" if len(keys) > 1 else ""
            raise ValueError(f"{folder}: tensor {keys[0]}{others} {what}")
    if info["error_msgs"]:
        raise ValueError(f"{folder}: the weights cannot be loaded: {'; '.join(info['error_msgs'])}")
    check_tied(folder, lm)
    return lm
