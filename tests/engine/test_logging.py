"""What the engine tells: nothing unless asked, then one line for what a user needs to know."""

import logging
import re
import subprocess
import sys

import pytest

from tritonllm import LLM, SamplingParams
from tritonllm.cli import logging_to_stderr, main
from tritonllm.demo import model_path
from tritonllm.engine.start.startup import load_parts  # noqa: F401  (so that the package's loggers exist)
from tritonllm.kernels.compile import monitor as compile_monitor
from tritonllm.kernels.compile.monitor import CompileMonitor
from tritonllm.kernels.runtime import tuning
from tritonllm.kernels.runtime.gpus import Gpu


def said(caplog, level=logging.INFO):
    return [record.getMessage() for record in caplog.records if record.levelno >= level]


def start(**options):
    return LLM(str(model_path()), device="cpu", num_blocks=options.pop("num_blocks", 64), **options)


def test_a_start_says_what_is_ready(caplog):
    with caplog.at_level(logging.INFO, "tritonllm"):
        start(max_num_seqs=3, enable_prefix_caching=False)
    (ready,) = [message for message in said(caplog) if "is ready" in message]
    assert re.match(r"\w+ForCausalLM \(float32\) is ready on the CPU after \d+\.\d s: ", ready)
    assert "KV cache of 64 blocks of 16 tokens" in ready and "0 CUDA graphs, up to 3 sequences" in ready
    assert ready.endswith("prefix cache off")
    (most,) = [message for message in said(caplog) if "Maximum concurrency" in message]
    assert most == "Maximum concurrency for 1,024 tokens per request: 1.00x"
    assert any(re.match(r"0\.\d+ GB of weights read from ", message) for message in said(caplog))
    assert not said(caplog, logging.WARNING)


def test_the_first_preemption_is_a_warning(caplog):
    llm = start(num_blocks=4, enable_prefix_caching=False)
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    for _ in range(2):
        llm.generate([[5] * 14, [6] * 14, [7] * 14], params, use_tqdm=False)
    assert llm.engine.stats.preemptions > 1
    (message,) = said(caplog, logging.WARNING)
    assert message.startswith("the KV cache (4 blocks) is too small for") and "max_num_seqs" in message


@pytest.fixture
def monitor(monkeypatch):
    monkeypatch.setattr(compile_monitor.knobs.compilation, "listener", None)
    return CompileMonitor()


class Source:
    name = "some_kernel"


def test_a_kernel_compiled_in_service_is_named_once(caplog, monitor):
    monitor._listen(cache_hit=False, src=Source())  # at the start: as it should be
    assert not said(caplog)
    monitor.serving = True
    monitor._listen(cache_hit=True, src=Source())
    assert not said(caplog)
    for _ in range(2):
        monitor._listen(cache_hit=False, src=Source())
    (message,) = said(caplog, logging.WARNING)
    assert message.startswith("kernel some_kernel was compiled while serving") and monitor.compiled == 3


def test_a_start_is_no_service(monkeypatch):
    seen = []
    monkeypatch.setattr(
        "tritonllm.engine.start.startup.load_model",
        lambda *args, **kwargs: seen.append(compile_monitor.MONITOR.serving) or 1 / 0,
    )
    monkeypatch.setattr(compile_monitor.MONITOR, "serving", True)
    with pytest.raises(ZeroDivisionError):
        start()
    assert seen == [False]


def test_tuning_tables(caplog):
    with caplog.at_level(logging.INFO, "tritonllm"):
        tuning.report_tables(Gpu("NVIDIA H200", 90, 132, 140))
        assert "linear" in tuning.tables_of("NVIDIA H200") and not said(caplog, logging.WARNING)
        assert "nvidia_h200" in said(caplog)[0]
        tuning.report_tables(Gpu("Some other GPU", 75, 132, 140))
        tuning.report_tables(Gpu("NVIDIA H100 80GB HBM3", 90, 132, 79))
    other, relative = said(caplog, logging.WARNING)
    assert "Some other GPU has no tuning tables" in other and "python -m autotune --all" in other
    assert "the launch configurations of the NVIDIA H200, its nearest relative" in relative


@pytest.mark.parametrize(
    ("verbosity", "shown"), [(0, ["WARNING"]), (1, ["INFO", "WARNING"]), (2, ["DEBUG", "INFO", "WARNING"])]
)
def test_verbosity(capsys, verbosity, shown):
    logger = logging.getLogger("tritonllm.something")
    with logging_to_stderr(verbosity):
        for level in (logging.DEBUG, logging.INFO, logging.WARNING):
            logger.log(level, "%s", "said")
    logger.warning("after")
    out, err = capsys.readouterr()
    assert out == "" and err.splitlines() == [f"{level} tritonllm.something: said" for level in shown]


def test_verbose_generate(capsys):
    arguments = ["generate", "--prompt", "Once", "--max-tokens", "2", "--device", "cpu", "--num-blocks", "64"]
    assert main([*arguments, "-v"]) == 0
    assert "is ready on the CPU" in capsys.readouterr().err
    assert main(arguments) == 0
    assert "is ready" not in capsys.readouterr().err


def test_a_program_that_sets_up_no_logging_sees_nothing():
    code = "import logging, tritonllm; logging.getLogger('tritonllm.engine').warning('unseen')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == done.stderr == ""
    assert [type(handler) for handler in logging.getLogger("tritonllm").handlers] == [logging.NullHandler]
