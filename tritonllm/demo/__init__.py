"""The checkpoints that ship with tritonllm: a small model, and a draft model for it that guesses ahead.

Both are ordinary Hugging Face folders, trained by ``examples/train_demo_model.py``; their README files say what they
can do.
"""

from pathlib import Path


def model_path() -> Path:
    """The folder of the demo model, 2.9 million parameters."""
    return Path(__file__).parent / "model"


def draft_path() -> Path:
    """The folder of its draft model, 0.7 million parameters with the same tokenizer."""
    return Path(__file__).parent / "draft"
