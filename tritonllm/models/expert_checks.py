"""Whether a model has the experts that the engine's options speak of, before anything is loaded."""

from tritonllm.models.fallback_decoder import FallbackSpec
from tritonllm.models.spec import ModelSpec


def check_counted(spec: ModelSpec | FallbackSpec) -> None:
    """Raises:
    ValueError: it has no experts whose tokens could be counted.
    """
    if isinstance(spec, FallbackSpec):
        raise ValueError(
            f"count_expert_load: {spec.architecture} runs through transformers, whose experts are not counted: leave "
            "it out"
        )
    if not spec.experts:
        raise ValueError(f"count_expert_load: {spec.architecture} has no experts: leave it out")
