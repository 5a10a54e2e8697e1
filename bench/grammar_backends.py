"""``python -m bench.grammar_backends``: xgrammar beside llguidance, on ten JSON schemas over SmolLM2's vocabulary.

Each schema comes with an answer that it allows. Both packages compile the schema, then follow the answer's tokens:
before each of them the mask of the next token is filled. Reported are the milliseconds until a compiled grammar could
fill its first mask (``first``: compilation and the first mask, since llguidance compiles as it goes), the microseconds
of the other masks (mean, and the slowest), and how many of the answer's tokens were the only ones allowed (``forced``),
with blanks as the engine allows them and without any (``forced_compact``). Times are processor time of one thread,
without a GPU.
"""

import argparse
import datetime
import json
import platform
import statistics
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

from autotune.revision import commit
from bench import smollm2
from bench.host import processor
from bench.tables import grammars
from tritonllm.config.sampling_params import StructuredOutputsParams
from tritonllm.engine.grammar import grammar, guidance

OUT = Path(__file__).parent / "results" / "grammar-backends-cpu.json"
REPEATS = 5


def _object(properties: dict[str, Any]) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


TEXT, WHOLE, NUMBER = {"type": "string"}, {"type": "integer"}, {"type": "number"}
DATE = {"type": "string", "pattern": "^[0-9]{4}-[0-9]{2}-[0-9]{2}$"}
CITIES = [f"{first}{last}" for first in ("North", "South", "New", "Old", "Port") for last in ("ham", "ton", "ford")]
CASES: dict[str, tuple[dict[str, Any], Any]] = {
    "person": (_object({"name": TEXT, "age": WHOLE}), {"name": "Ada Lovelace", "age": 36}),
    "bounded text": (
        _object({"title": {"type": "string", "maxLength": 40}, "body": {"type": "string", "maxLength": 200}}),
        {"title": "A walk by the sea", "body": "It was early, and nobody else was there but the gulls."},
    ),
    "choices": (
        _object({"city": {"enum": CITIES}, "size": {"enum": ["small", "medium", "large"]}}),
        {"city": "Newton", "size": "medium"},
    ),
    "patterns": (
        _object({"born": DATE, "phone": {"type": "string", "pattern": "^\\+[0-9]{1,3} [0-9]{6,10}$"}}),
        {"born": "1815-12-10", "phone": "+44 20794600"},
    ),
    "range": (
        _object({"month": WHOLE | {"minimum": 1, "maximum": 12}, "year": WHOLE | {"minimum": 1970, "maximum": 2099}}),
        {"month": 11, "year": 2024},
    ),
    "numbers": ({"type": "array", "items": NUMBER}, [0.5, -12, 3.25e10, 1000, 17.125, 6]),
    "tool call": (
        _object(
            {
                "name": {"const": "get_weather"},
                "arguments": _object({"location": TEXT, "unit": {"enum": ["celsius", "fahrenheit"]}}),
            }
        ),
        {"name": "get_weather", "arguments": {"location": "Lisbon, Portugal", "unit": "celsius"}},
    ),
    "order": (
        _object(
            {
                "id": WHOLE,
                "customer": _object({"name": TEXT, "address": _object({"street": TEXT, "town": TEXT, "zip": WHOLE})}),
                "items": {"type": "array", "items": _object({"product": TEXT, "price": NUMBER, "count": WHOLE})},
            }
        ),
        {
            "id": 81,
            "customer": {"name": "B. Smith", "address": {"street": "High Street 3", "town": "Oldham", "zip": 12345}},
            "items": [{"product": "tea", "price": 2.5, "count": 3}, {"product": "bread", "price": 4, "count": 1}],
        },
    ),
    "recursion": (
        {
            "$defs": {
                "tree": _object({"value": WHOLE, "children": {"type": "array", "items": {"$ref": "#/$defs/tree"}}})
            },
            "$ref": "#/$defs/tree",
        },
        {"value": 1, "children": [{"value": 2, "children": []}, {"value": 3, "children": []}]},
    ),
    "forty fields": (
        _object({f"field_number_{i}": (TEXT, WHOLE, {"type": "boolean"})[i % 3] for i in range(40)}),
        {f"field_number_{i}": ("some text", 7 * i, True)[i % 3] for i in range(40)},
    ),
}

Fill = Callable[[np.ndarray], None]
Take = Callable[[int], bool]
Start = Callable[[dict[str, Any], bool], tuple[Fill, Take]]  # a schema; blanks or none


def xgrammar_start(tokenizer: Any, vocab: int) -> Start:
    """Grammars of xgrammar, as the engine compiles them."""
    import xgrammar

    info = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=vocab)

    def start(schema: dict[str, Any], blanks: bool) -> tuple[Fill, Take]:
        compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)
        wish = StructuredOutputsParams(json=schema, disable_any_whitespace=not blanks)
        matcher = xgrammar.GrammarMatcher(compiler.compile_grammar(grammar.parse(wish)))
        return lambda mask: matcher.fill_next_token_bitmask(mask), matcher.accept_token

    return start


def llguidance_start(tokenizer: Any, vocab: int) -> Start:
    """Grammars of llguidance, as the engine makes them ready."""
    compiler = guidance.GuidanceCompiler(tokenizer, vocab, [tokenizer.eos_token_id])

    def start(schema: dict[str, Any], blanks: bool) -> tuple[Fill, Take]:
        wish = StructuredOutputsParams(json=schema, disable_any_whitespace=not blanks)
        matcher = compiler.compile_grammar(guidance.parse(wish)).new_matcher()
        return lambda mask: matcher.fill_next_token_bitmask(mask), matcher.accept_token

    return start


def follow(start: Start, schema: dict[str, Any], tokens: list[int], vocab: int, blanks: bool) -> dict[str, float]:
    """What one answer takes.

    Raises:
        ValueError: a token of it is not allowed.
    """
    mask = np.zeros((1, -(-vocab // 32)), dtype=np.int32)
    begin = time.process_time()
    fill, take = start(schema, blanks)
    fills, forced = [], 0
    for token in tokens:
        fill(mask)
        fills.append(time.process_time() - begin)
        if not mask[0, token // 32] >> (token % 32) & 1 or not take(token):
            raise ValueError(f"token {token} of the answer is not allowed")
        forced += int(np.bitwise_count(mask.view(np.uint32)).sum()) == 1
        begin = time.process_time()
    first, *others = fills
    return {
        "first_ms": 1e3 * first,
        "fill_us": 1e6 * statistics.mean(others),
        "slowest_us": 1e6 * max(others),
        "forced": forced,
    }


def measure(start: Start, case: str, tokenizer: Any, vocab: int) -> dict[str, Any]:
    """A case in one package: medians of some repetitions."""
    schema, answer = CASES[case]
    tokens = tokenizer.encode(json.dumps(answer), add_special_tokens=False)
    runs = [follow(start, schema, tokens, vocab, True) for _ in range(REPEATS)]
    numbers = {name: statistics.median(run[name] for run in runs) for name in runs[0]}
    return numbers | {"tokens": len(tokens), "forced_compact": follow(start, schema, tokens, vocab, False)["forced"]}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.grammar_backends",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", type=Path, help="a folder with a tokenizer (default: see bench/smollm2.py)")
    parser.add_argument("--packages", default="xgrammar,llguidance", metavar="P,P", help="%(default)s")
    parser.add_argument("--out", type=Path, default=OUT, metavar="FILE", help="the numbers as JSON (%(default)s)")
    args = parser.parse_args(argv)
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(args.model or smollm2.folder())
    starts = {"xgrammar": xgrammar_start, "llguidance": llguidance_start}
    names = args.packages.split(",")
    if unknown := [name for name in names if name not in starts]:
        parser.error(f"--packages must name some of {', '.join(starts)}, got {', '.join(map(repr, unknown))}")
    made = {name: starts[name](tokenizer, len(tokenizer)) for name in names}
    rows = [
        {"case": case, "package": name} | measure(start, case, tokenizer, len(tokenizer))
        for case in CASES
        for name, start in made.items()
    ]
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    versions = {name: metadata.version(name) for name in names}
    machine = {"cpu": processor(), "python": platform.python_version(), **versions}
    report = {"machine": machine, "commit": commit(), "date": now, "vocabulary": len(tokenizer), "grammars": rows}
    args.out.write_text(json.dumps(report, indent=1) + "\n")
    print(grammars(report))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
