"""Whether the tests catch faults: puts faults into a copy of the tree, one at a time, and runs the nearest tests there.

    python tests/mutations.py                              # each fault, first with --quick, then with all tests
    python tests/mutations.py --only norm-rounding --run all --out faults.json

This is no part of the tests: it takes half a minute or so for each fault. Run it after a change that should make the
tests faster, and see whether they still find what they found. A fault is one wrong line that a reviewer could overlook.
If the tree has it no more, or twice, nothing is run: then write the fault anew, for the line that took its place.

A fault is caught where a test fails (pytest's exit code 1). Where pytest could not collect, found no tests, or took
longer than ``--timeout``, the fault is not caught, and the table says why.
"""

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
# As the Makefile runs its parts. These three kinds cannot share a process.
PLAIN: dict[str, str] = {}
PARTS = {
    "kernels": {"TRITON_INTERPRET": "1"},
    "aot": {"TRITONLLM_CPU_BACKEND": "compile"},
    "engine": PLAIN,
    "e2e": PLAIN,
    "serve": PLAIN,
    "teach": PLAIN,
}
RUNS = {"quick": ["--quick"], "all": []}  # `make test` and `make test-all`
NOT_CAUGHT = {
    0: "the tests pass",
    2: "pytest was interrupted, or could not collect",
    3: "pytest failed",
    4: "pytest was called in a wrong way",
    5: "there are no such tests",
}

# Of each fault its name, the part that runs the nearest tests and these, paths or node ids; the file; a piece of one of
# its lines, which it has once; and what stands there instead.
FAULTS = r"""
decode-parts-not-rescaled: kernels tests/kernels/attention/test_decode.py::test_split_kernel_matches_reference
tritonllm/kernels/attention/portable/tile.py
- b_l = b_l * b_alpha + tl.sum(b_weight, 0)
+ b_l = b_l + tl.sum(b_weight, 0)

prefill-sink-in-every-share: kernels tests/kernels/attention/test_prefill.py::test_keys_shared_out
tritonllm/kernels/attention/portable/prefill.py
- m_row & (part == 0) if SPLIT else m_row, BLOCK_M)
+ m_row, BLOCK_M)

merge-of-empty-sets: kernels tests/kernels/attention/test_merge.py
tritonllm/kernels/attention/merge.py
- b_m = tl.maximum(b_lse_b, LOWEST)
+ b_m = b_lse_b

norm-rounding: kernels tests/kernels/elementwise/test_norm.py
tritonllm/kernels/elementwise/norm.py
- b_x = (b_x * x_scale + b_residual).to(p_residual.dtype.element_ty).to(tl.float32)
+ b_x = b_x * x_scale + b_residual

longrope-at-its-length: kernels tests/kernels/elementwise/test_rope.py
tritonllm/kernels/elementwise/rope_cache.py
- regime = "long" if length > trained else "short"
+ regime = "long" if length >= trained else "short"

store-skips-slot-0: kernels tests/kernels/attention/test_kv_cache.py
tritonllm/kernels/attention/kv_cache.py
- mask = (b_slot >= 0)[:, None] & m_col[None, :]
+ mask = (b_slot > 0)[:, None] & m_col[None, :]

likeliest-of-equals: kernels tests/kernels/sampling/test_logprobs.py::test_order_among_few_equals
tritonllm/kernels/sampling/logprobs.py
- m_before = (c_token[:, None] < b_token[None, :])
+ m_before = (c_token[:, None] > b_token[None, :])

presence-times-count: kernels tests/kernels/sampling/test_edits.py::test_sample_applies_them
tritonllm/kernels/sampling/edits.py
- b_x = tl.where(b_count > 0, b_x - (frequency * b_count + presence), b_x)
+ b_x = tl.where(b_count > 0, b_x - (frequency + presence) * b_count, b_x)

rejection-noise-again: kernels tests/kernels/speculative/test_rejection.py::test_matches_reference
tritonllm/kernels/speculative/judge.py
- at = step + position
+ at = step

expert-groups-by-two-without-bias: kernels tests/kernels/moe/test_route.py::test_groups_and_bias_match_reference
tritonllm/kernels/moe/route.py
- if HAS_BIAS and GROUP_SIZE > 1:
+ if GROUP_SIZE > 1:

linear-norm-over-the-padding: kernels tests/kernels/dense/test_linear.py::test_a_norm_of_columns_that_fill_no_tile
tritonllm/kernels/dense/portable/rows.py
- b_y *= tl.rsqrt(tl.sum(b_squares) / K + eps)
+ b_y *= tl.rsqrt(tl.sum(b_squares) / (TILES * BLOCK_K) + eps)

dependent-launch-not-on-hopper: aot tests/aot/runtime/test_dependent_launch.py
tritonllm/kernels/runtime/dependent_launch.py
- isinstance(chip.arch, int) and chip.arch >= 90
+ isinstance(chip.arch, int) and chip.arch > 90

expert-tile-too-large: aot tests/aot/moe/test_experts.py::test_compiles[90]
tritonllm/kernels/moe/tiles.py
- 128: {"BLOCK_N": 256, "BLOCK_K": 64, "GROUP_M": 16, "num_warps": 8, "num_stages": 3},
+ 128: {"BLOCK_N": 256, "BLOCK_K": 64, "GROUP_M": 16, "num_warps": 8, "num_stages": 5},

residual-multiplier-lost: engine tests/layers/test_residual.py tests/models/test_sentence_transformers.py
tritonllm/layers/residual.py
- self.rows.add_(addend, alpha=self._scale)
+ self.rows.add_(addend)

gemma3-window-pattern: engine tests/models/test_families.py tests/models/test_parity.py
tritonllm/models/families/gemma.py
- windows = config.windows([(i + 1) % pattern != 0 for i in
+ windows = config.windows([i % pattern != 0 for i in

key-heads-of-the-wrong-rank: engine tests/models/test_tensor_parallel.py::test_ranks_compute_what_one_does
tritonllm/models/shards.py
- first = rank // (size // self.units)
+ first = rank % self.units

vocabulary-cut-inside-of-groups: engine tests/dist/test_group.py
tritonllm/dist/group.py
- for unit in (128, 8):
+ for unit in (8, 128):

preempts-with-blocks-left: engine tests/engine/test_scheduler.py
tritonllm/engine/schedule/scheduler.py
- while needed > self.pool.num_free and
+ while needed >= self.pool.num_free and

evicted-block-still-found: engine tests/engine/test_block_pool.py
tritonllm/engine/schedule/block_pool.py
- del self._block_of[label]
+ self._block_of.get(label)

cache-salt-not-in-the-digest: engine tests/engine/test_prefix_cache.py
tritonllm/engine/schedule/prefix_cache.py
- parent = hashes[-1] if hashes else self._root(request)
+ parent = hashes[-1] if hashes else b""

stop-string-across-tokens: engine tests/engine/test_detokenizer.py
tritonllm/engine/text/detokenizer.py
- at = text.find(s, max(begin, end - new_chars - len(s) + 1), end)
+ at = text.find(s, max(begin, end - new_chars - len(s) + 2), end)

json-whitespace: e2e tests/e2e/test_structured_outputs.py
tritonllm/engine/grammar/grammar.py
- grammar_of(document, not wish.disable_any_whitespace)
+ grammar_of(document, True)

drafts-never-tried-again: engine tests/engine/test_speculation.py
tritonllm/engine/schedule/speculation.py
- self._plain = 0 if any(item.drafts for item in scheduled) else self._plain + 1
+ self._plain = 0 if any(item.drafts for item in scheduled) else self._plain

no-room-for-warm-up: engine tests/engine/test_step_sizes.py
tritonllm/engine/step/step_sizes.py
- padded = self.scheduler.max_num_seqs + max(captured, 1)
+ padded = self.scheduler.max_num_seqs + captured

old-name-of-shared-blocks: e2e tests/engine/test_sleep.py tests/engine/test_kv_transfer.py tests/e2e/test_kv_transfer.py
tritonllm/engine/loop/engine.py
- self._transfer.rename()
+ pass

use-of-a-file-not-noted: engine tests/engine/test_kv_files.py
tritonllm/engine/transfer/files.py
- if time.time() - status.st_mtime > TOUCH:
+ if time.time() - status.st_mtime < TOUCH:

beams-end-early: e2e tests/e2e/test_beam_search.py
tritonllm/engine/loop/beam_search.py
- return running[0].total / reached**penalty <= self.finished[-1][0]
+ return running[0].total / reached**penalty <= self.finished[0][0]

min-tokens-may-not-equal-max: engine tests/engine/test_sampling_params.py
tritonllm/config/sampling_params.py
- if self.max_tokens is not None and self.min_tokens > self.max_tokens:
+ if self.max_tokens is not None and self.min_tokens >= self.max_tokens:

usage-of-the-first-choice: serve tests/serve/test_openai_client.py
tritonllm/serve/api/replies.py
- self.completion_tokens += sum(len(completion.token_ids) for completion in output.outputs)
+ self.completion_tokens += len(output.outputs[0].token_ids)

replicas-under-one-label: serve tests/serve/test_metrics.py
tritonllm/serve/api/metrics.py
- labels = self._model_name, str(number)
+ labels = self._model_name, "0"

queue-one-shorter: serve tests/serve/test_room.py
tritonllm/serve/engines/room.py
- if taken + sequences > self.most:
+ if taken + sequences >= self.most:

call-without-an-end: serve tests/serve/test_parsing.py
tritonllm/serve/parsing/tools.py
- yield from text.drop(end, *ends)  # a brace too many, for instance
+ yield from text.drop(end)

choices-of-several-prompts: serve tests/serve/test_openai_client.py
tritonllm/serve/api/completions_api.py
- return prompt * self._n + completion.index
+ return prompt + completion.index

half-a-line-kept: serve tests/serve/test_batch.py
tritonllm/serve/processes/batch.py
- file.truncate(end)
+ file.seek(end)

clients-key-handed-on: teach tests/route/test_limits.py
tritonllm/route/upstream.py
- (b"authorization", b"x-api-key")
+ (b"authorization",)

bench-percentile-off: e2e tests/e2e/test_cli_bench.py
tritonllm/cli/bench_runs.py
- at = (len(ordered) - 1) * percent / 100
+ at = len(ordered) * percent / 100

byte-order-mark-in-the-prompt: e2e tests/e2e/test_cli.py
tritonllm/cli/prompts.py
- return text.removeprefix("\ufeff").replace("\r\n", "\n").replace("\r", "\n")
+ return text.replace("\r\n", "\n").replace("\r", "\n")

priority-forgotten-offline: engine tests/offline/test_engines.py
tritonllm/offline/engines.py
- heapq.heappush(self._waiting, (priority, self._arrivals, request_id, prepared, params))
+ heapq.heappush(self._waiting, (0, self._arrivals, request_id, prepared, params))

rope-flops-halved: teach tests/teach/test_xray_costs.py
tritonllm/teach/xray/costs.py
- return 3 * rows * rotary
+ return 2 * rows * rotary

tuner-takes-noise: engine tests/engine/test_autotune.py
autotune/search.py
- if again < min(us, (1 - MIN_GAIN) * default_us):
+ if again < us:
"""


class Fault(NamedTuple):
    """As ``FAULTS`` has it."""

    name: str
    part: str
    tests: list[str]
    file: str
    before: str
    after: str

    @classmethod
    def read(cls, text: str) -> "Fault":
        head, file, before, after = text.strip().split("\n")
        name, words = head.split(": ")
        part, *tests = words.split()
        return cls(name, part, tests, file, before.removeprefix("- "), after[2:])

    def defects(self) -> list[str]:
        """Why it cannot be put into this tree."""
        path = ROOT / self.file
        times = path.read_text().count(self.before) if path.is_file() else 0
        found = [] if times == 1 else [f"{self.file} has this {times} times instead of once: {self.before}"]
        found += [] if self.part in PARTS else [f"there is no part {self.part}"]
        found += [f"there is no {test}" for test in self.tests if not (ROOT / test.split("::")[0]).exists()]
        return [f"{self.name}: {what}" for what in found]


class Outcome(NamedTuple):
    """What came of a fault.

    Attributes:
        run: of ``RUNS``, in which a test failed; ``None``: in none.
        test: the first one that failed; ``None``: none has.
        why_not: the reason of that.
        seconds: that the tests took.
    """

    fault: Fault
    run: str | None
    test: str | None
    why_not: str | None
    seconds: float

    def __str__(self) -> str:
        by = "NOT CAUGHT" if self.run is None else {"quick": "make test", "all": "make test-all"}[self.run]
        return f"{self.fault.name:34} {self.fault.file:48} {self.seconds:4.0f} s  {by}: {self.test or self.why_not}"


def copy_tree(folder: Path) -> None:
    """Everything that git does not ignore, as it is in this checkout."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, names.split("\0")):
        if (ROOT / name).is_file():  # else it is deleted here
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)


def run_pytest(folder: Path, fault: Fault, options: list[str], timeout: float) -> tuple[int | None, str]:
    """Its exit code, ``None`` if it took too long, and what it printed."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("TRITON", "PYTEST", "HYPO"))}
    environ |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(folder), **PARTS[fault.part]}
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *options, *fault.tests]
    with tempfile.TemporaryFile() as said:  # and no pipe, which a process that outlives pytest would keep open
        # A session of its own: with pytest end the processes that its tests have started.
        process = subprocess.Popen(command, cwd=folder, env=environ, stdout=said, stderr=said, start_new_session=True)
        try:
            code = process.wait(timeout)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        said.seek(0)
        return code, said.read().decode(errors="replace")


def try_out(fault: Fault, runs: list[str], timeout: float) -> Outcome:
    begin, why_not = time.monotonic(), None
    with tempfile.TemporaryDirectory(prefix="mutation-") as name:
        copy_tree(Path(name))
        path = Path(name, fault.file)
        path.write_text(path.read_text().replace(fault.before, fault.after))
        for run in runs:
            code, said = run_pytest(Path(name), fault, RUNS[run], timeout)
            if code == 1:
                failed = re.search(r"^(?:FAILED|ERROR) (tests/.*?)(?: - .*)?$", said, re.MULTILINE)
                return Outcome(fault, run, failed[1] if failed else "?", None, time.monotonic() - begin)
            if code is None:
                why_not = f"pytest took more than {timeout:g} s"
                break
            why_not = NOT_CAUGHT.get(code, f"pytest ended with {code}")
            if code:
                why_not += (
                    ": " + (re.findall(r"^(?:.*error: |ERROR).*", said, re.MULTILINE) or ["it does not say why"])[-1]
                )
            if code not in (0, 5):  # of the nearest tests, --quick may leave out all
                break
    return Outcome(fault, None, None, why_not, time.monotonic() - begin)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these faults; by default all")
    parser.add_argument("--run", choices=RUNS, help="one of the two; by default `all`, too, where `quick` passes")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="faults at a time (default 1)")
    parser.add_argument("--timeout", type=float, default=900.0, metavar="S", help="seconds of one pytest (default 900)")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the outcomes to FILE as JSON")
    return parser.parse_args()


def main() -> int:
    args = arguments()
    faults = [Fault.read(text) for text in FAULTS.strip().split("\n\n")]
    names = [fault.name for fault in faults]
    wrong = [what for fault in faults for what in fault.defects()]
    wrong += [f"{name}: two faults have this name" for name in sorted({n for n in names if names.count(n) > 1})]
    wrong += [f"--only: there is no fault {name}" for name in args.only or () if name not in names]
    if wrong:
        sys.stderr.write("\n".join(wrong) + "\n")
        return 2
    chosen = [fault for fault in faults if args.only is None or fault.name in args.only]
    runs = [*RUNS] if args.run is None else [args.run]
    outcomes = []
    with ThreadPoolExecutor(args.jobs) as pool:
        for outcome in pool.map(lambda fault: try_out(fault, runs, args.timeout), chosen):
            sys.stdout.write(f"{outcome}\n")
            sys.stdout.flush()
            outcomes.append(outcome)
    caught = sum(outcome.run is not None for outcome in outcomes)
    sys.stdout.write(f"{caught} of {len(outcomes)} faults are caught\n")
    if args.out is not None:
        entries = [
            {name: getattr(one.fault, name) for name in ("name", "file", "part")}
            | {"run": one.run, "caught_by": one.test, "why_not": one.why_not, "seconds": round(one.seconds, 1)}
            for one in outcomes
        ]
        args.out.write_text(json.dumps(entries, indent=1) + "\n")
    return int(caught < len(outcomes))


if __name__ == "__main__":
    sys.exit(main())
