"""``python -m bench.accuracy``: what narrow weights and a narrow cache change in a model's logits and perplexity.

Each format is measured as users have it: ``tritonllm quantize`` writes the model, which is then loaded and reads a
text. The reference is the same model in float32 with the weights as they were. A format's row is computed in
``--dtype``: in float32, by default, its error is that of the numbers alone; in bfloat16 the rounding of activations is
in it, which the row ``bfloat16`` has alone.

- ``logit_error``: ‖logits − reference‖ / ‖reference‖ over all positions, each row less its mean (a constant added to
  all logits changes nothing); ``logit_mean`` and ``logit_max``: the mean and the largest magnitude of a difference;
- ``kl``: the mean over positions of the Kullback-Leibler divergence of the model's distribution from the reference's,
  in nats; ``kl_max``: the largest;
- ``agreement``: the share of positions at which both have the same most likely token;
- ``perplexity``: exp of the mean negative log-probability of the text's next tokens.

The models are the package's demo model, on documents that it was not trained on (``examples/demo_corpus``), and
SmolLM2-135M-Instruct, where its package is installed (``bench/smollm2.py``), on the beginning of Lewis Carroll's
"Alice's Adventures in Wonderland" (1865, in the public domain; ``bench/texts/alice.txt``, not compared with an
edition). SmolLM2's weights are themselves those of a file of four bits in groups of 32, so its rows say what a format
does to these.
"""

import argparse
import datetime
import json
import platform
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from autotune.revision import commit
from bench import smollm2
from bench.host import processor
from bench.reports import RESULTS, markdown
from bench.tables import accuracy
from examples.demo_corpus import documents
from tritonllm.demo import model_path
from tritonllm.models.formats.writing import WRITTEN
from tritonllm.models.loading import load_model, read_spec
from tritonllm.models.one_sequence import empty_cache, run_alone
from tritonllm.models.quantized_checkpoint import quantize_checkpoint

OUT = RESULTS / "accuracy"
TEXT = Path(__file__).parent / "texts" / "alice.txt"
DOCS = Path(__file__).parents[1] / "docs"
WINDOW = 512  # tokens of a sequence
GROUP_SIZE = 64  # of w4a16: rows of neither model are whole groups of 128
FLOAT8_CACHE = "fp8 cache"
CALIBRATED, CALIBRATION_TOKENS = "w4a16 calibrated", 4096  # on other texts than those that are measured
FORMATS = ("bfloat16", *WRITTEN, CALIBRATED, FLOAT8_CACHE)


@dataclass(frozen=True)
class Subject:
    """A model and what it reads.

    Attributes:
        name: what tables call the model.
        folder: where it is.
        text: what tables call the text.
        sequences: the token ids of the text, each sequence by itself.
        others: those of texts on which it is calibrated.
    """

    name: str
    folder: Path
    text: str
    sequences: list[list[int]]
    others: list[list[int]]

    @property
    def tokens(self) -> int:
        return sum(map(len, self.sequences))


@dataclass(frozen=True)
class Bounds:
    """What a format may change at most.

    Attributes:
        kl: the largest mean divergence, in nats.
        agreement: the smallest share of equal most likely tokens.
        perplexity: the largest perplexity, as a multiple of the reference's.
    """

    kl: float
    agreement: float
    perplexity: float

    def broken_by(self, row: dict[str, Any], reference: float) -> list[str]:
        """The names of the measures of a row that are beyond these, given the reference's perplexity."""
        found = {
            "kl": row["kl"] > self.kl,
            "agreement": row["agreement"] < self.agreement,
            "perplexity": row["perplexity"] > self.perplexity * reference,
        }
        return [name for name, broken in found.items() if broken]


# Of the demo model, which tests/engine/test_bench_accuracy.py holds against these.
BOUNDS = {
    "bfloat16": Bounds(kl=1e-4, agreement=0.97, perplexity=1.01),
    "fp8": Bounds(kl=1e-4, agreement=0.97, perplexity=1.01),
    "int8": Bounds(kl=2e-5, agreement=0.98, perplexity=1.01),
    "w4a16": Bounds(kl=3e-3, agreement=0.93, perplexity=1.02),
    "mxfp4": Bounds(kl=3e-3, agreement=0.93, perplexity=1.02),
    CALIBRATED: Bounds(kl=3e-3, agreement=0.93, perplexity=1.02),
    FLOAT8_CACHE: Bounds(kl=1e-4, agreement=0.97, perplexity=1.01),
}


def bounds_table() -> str:
    """The bounds in Markdown, as docs/models.md states them."""
    head = ["format", "KL, nats, at most", "same most likely token, at least", "perplexity, at most"]
    rows = [[name, f"{b.kl:g}", f"{b.agreement:.0%}", f"{b.perplexity:.2f} times"] for name, b in BOUNDS.items()]
    return markdown(head, rows)


def demo(tokens: int) -> Subject:
    """The demo model, and documents of the shard of its corpus that training leaves out."""
    tokenizer = _tokenizer(model_path())
    texts = (tokenizer(text).input_ids[:WINDOW] for _, text in documents(0, 0, tokens + CALIBRATION_TOKENS))
    found: list[list[list[int]]] = []
    for count in (tokens, CALIBRATION_TOKENS):  # a document has many tokens
        found.append([])
        while sum(map(len, found[-1])) < count:
            found[-1].append(next(texts))
    return Subject("demo", model_path(), "documents that training left out", *found)


def published(tokens: int) -> Subject:
    """SmolLM2, and prose; it is calibrated on pages of docs/.

    Raises:
        ModuleNotFoundError: a package is not installed.
    """
    folder = smollm2.folder()
    tokenizer = _tokenizer(folder)
    pages = "".join((DOCS / name).read_text(encoding="utf-8") for name in ("teach.md", "operations.md"))
    read, others = (
        [ids[begin : begin + WINDOW] for begin in range(0, len(ids), WINDOW)]
        for ids in (
            tokenizer(TEXT.read_text(encoding="utf-8")).input_ids[:tokens],
            tokenizer(pages).input_ids[:CALIBRATION_TOKENS],
        )
    )
    return Subject("SmolLM2-135M-Instruct", folder, TEXT.name, read, others)


def _tokenizer(folder: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


@torch.inference_mode()
def logits_of(
    folder: Path, sequences: Sequence[Sequence[int]], dtype: torch.dtype, device: torch.device, cache: torch.dtype
) -> list[torch.Tensor]:
    """The logits ``[T, vocabulary]`` float32 of each sequence, on the host.

    Args:
        dtype: the dtype of weights and activations.
        cache: the dtype of keys and values.
    """
    model = load_model(folder, read_spec(folder), dtype=dtype, device=device, max_model_len=WINDOW)
    hidden = (run_alone(model, device, ids, empty_cache(model, device, len(ids), cache)) for ids in sequences)
    return [model.compute_logits(states).float().cpu() for states in hidden]


def compared(
    found: Sequence[torch.Tensor], reference: Sequence[torch.Tensor], sequences: Sequence[Sequence[int]]
) -> dict[str, float]:
    """The measures of this file's docstring, from the logits of each sequence."""
    total = dict.fromkeys(("square", "of", "absolute", "numbers", "kl", "same", "rows", "nll", "next"), 0.0)
    most = {"logit_max": 0.0, "kl_max": 0.0}
    for mine, theirs, ids in zip(found, reference, sequences, strict=True):
        centred, wanted = (logits - logits.mean(-1, keepdim=True) for logits in (mine, theirs))
        difference = (centred - wanted).abs()
        logp, logq = mine.double().log_softmax(-1), theirs.double().log_softmax(-1)
        divergence = (logq.exp() * (logq - logp)).sum(-1)
        total["square"] += float(difference.double().square().sum())
        total["of"] += float(wanted.double().square().sum())
        total["absolute"] += float(difference.double().sum())
        total["numbers"] += difference.numel()
        total["kl"] += float(divergence.sum())
        total["same"] += int((mine.argmax(-1) == theirs.argmax(-1)).sum())
        total["rows"] += len(mine)
        total["nll"] -= float(logp[:-1].gather(1, torch.tensor(ids[1:])[:, None]).sum())
        total["next"] += len(ids) - 1
        most["logit_max"] = max(most["logit_max"], float(difference.max()))
        most["kl_max"] = max(most["kl_max"], float(divergence.max()))
    return {
        "logit_error": (total["square"] / total["of"]) ** 0.5,
        "logit_mean": total["absolute"] / total["numbers"],
        "kl": total["kl"] / total["rows"],
        "agreement": total["same"] / total["rows"],
        "perplexity": float(torch.tensor(total["nll"] / total["next"]).double().exp()),
        **most,
    }


def rows_of(
    subject: Subject, formats: Sequence[str], dtype: torch.dtype, device: torch.device
) -> Iterator[dict[str, Any]]:
    """A row for the reference, and one for each format."""
    reference = logits_of(subject.folder, subject.sequences, torch.float32, device, torch.float32)
    about = {"model": subject.name, "text": subject.text, "tokens": subject.tokens}
    yield about | {"format": "float32"} | compared(reference, reference, subject.sequences)
    for format in formats:
        with tempfile.TemporaryDirectory() as scratch:
            folder, size, how = subject.folder, None, dtype
            written, texts = format.removesuffix(" calibrated"), subject.others if format == CALIBRATED else None
            if written in WRITTEN:
                folder = Path(scratch) / "narrow"
                size = GROUP_SIZE if WRITTEN[written].other_sizes else None
                quantize_checkpoint(subject.folder, folder, written, group_size=size, calibrate=texts, progress=False)
            elif format != FLOAT8_CACHE:
                how = getattr(torch, format)
            cache = torch.float8_e4m3fn if format == FLOAT8_CACHE else how
            found = logits_of(folder, subject.sequences, how, device, cache)
        about_format = {"format": format, "dtype": str(how).removeprefix("torch.")}
        about_format |= {} if size is None else {"group_size": size}
        yield about | about_format | compared(found, reference, subject.sequences)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.accuracy", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", default="demo,smollm2", metavar="M,M", help="%(default)s")
    parser.add_argument("--formats", default=",".join(FORMATS), metavar="F,F", help="%(default)s")
    parser.add_argument("--tokens", type=int, default=1024, metavar="N", help="of each text (%(default)s)")
    parser.add_argument("--dtype", default="float32", help="of the formats' rows (%(default)s)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="%(default)s")
    parser.add_argument("--out", type=Path, metavar="FILE", help=f"the numbers as JSON (default: a file in {OUT})")
    args = parser.parse_args(argv)
    device, dtype = torch.device(args.device), getattr(torch, args.dtype)
    named = torch.cuda.get_device_name(device) if device.type == "cuda" else processor()
    machine = {"gpu" if device.type == "cuda" else "cpu": named, "python": platform.python_version()}
    machine |= {"torch": torch.__version__, "transformers": version("transformers")}
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    report: dict[str, Any] = {"machine": machine, "commit": commit(), "date": now, "accuracy": []}
    makers = {"demo": demo, "smollm2": published}
    for model in args.models.split(","):
        try:
            subject = makers[model](args.tokens)
        except ModuleNotFoundError as error:
            print(error, file=sys.stderr)
            continue
        for row in rows_of(subject, args.formats.split(","), dtype, device):
            report["accuracy"].append(row)
            print(json.dumps(row), file=sys.stderr)
    print(accuracy(report))
    kind = "cpu" if device.type == "cpu" else named.split()[-1].lower()
    out = args.out or OUT / f"{kind}-{args.dtype}.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(report, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
