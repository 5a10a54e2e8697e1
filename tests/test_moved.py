"""Modules that lie in rooms now are found under their old names."""

import importlib
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

import tritonllm
from tritonllm.moved import MERGED, place_of

PACKAGE = Path(tritonllm.__file__).parent


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("config", None),  # it has its name still
        ("inputs", "config.prompts"),
        ("sampling_params", "config.sampling_params"),
        ("kv_transfer_config", "config.kv_transfer"),
        ("http_guard", "http.guard"),
        ("starting", "system.starting"),
        ("engine.engine", "engine.loop.engine"),
        ("engine.scheduler", "engine.schedule.scheduler"),
        ("engine.outputs", "engine.data.outputs"),
        ("engine.arg_utils", "engine.start.arg_utils"),
        ("engine.kv_connector", "engine.transfer.connector"),
        ("engine.kv_cache", "engine.cache.kv_cache"),
        ("engine.cpu_threads", "system.cpu_threads"),
        ("serve.async_llm", "serve.engines.async_llm"),
        ("serve.ray_serve", "serve.ray.ray_serve"),
        ("serve.ray_options", "serve.ray.options"),
        ("serve.metrics", "serve.api.metrics"),
        ("serve.batch", "serve.processes.batch"),
        ("serve.ray_batch", "serve.ray.batch"),
        ("route.ask", "http.ask"),
        ("teach.trace", "telemetry.trace"),
        ("teach.dashboard.state", "telemetry.activity_state"),
        ("engine.sleep", "engine.loop.engine"),
        ("engine.nothing", None),
        ("nothing", None),
        ("kernels.norm", None),
    ],
)
def test_old_names(old, new):
    assert place_of(old) == new


def test_each_file_of_a_room_has_an_old_name():
    for path in [*PACKAGE.glob("engine/*/[a-z]*.py"), *PACKAGE.glob("serve/[!p]*/[a-z]*.py")]:
        (part, room), new = path.parent.parts[-2:], ".".join(path.relative_to(PACKAGE).with_suffix("").parts)
        prefix = {"transfer": "kv_", "ray": "ray_"}.get(room, "")
        assert new in (place_of(f"{part}.{path.stem}"), place_of(f"{part}.{prefix}{path.stem}"))


def test_merged_files_lie_where_the_table_says():
    assert [new for new in MERGED.values() if not (PACKAGE / f"{new.replace('.', '/')}.py").exists()] == []
    assert [old for old in MERGED if (PACKAGE / f"{old.replace('.', '/')}.py").exists()] == []


def test_an_old_name_is_the_module_and_says_its_new_one():
    with pytest.warns(DeprecationWarning, match=r"tritonllm\.engine\.outputs is tritonllm\.engine\.data\.outputs now"):
        old = importlib.import_module("tritonllm.engine.outputs")
    new = importlib.import_module("tritonllm.engine.data.outputs")
    assert old is new and new.__spec__.name == new.__name__ == "tritonllm.engine.data.outputs"
    assert old.RequestOutput is tritonllm.RequestOutput
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert importlib.import_module("tritonllm.engine.outputs") is new  # said once


def test_what_is_nowhere_is_no_module():
    with pytest.raises(ModuleNotFoundError, match=r"tritonllm\.engine\.nothing"):
        importlib.import_module("tritonllm.engine.nothing")


def test_scripts_of_before_run():
    code = "import tritonllm.sampling_params\nimport tritonllm.engine.kv_params as kv_params\nprint(kv_params.__name__)"
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False)
    assert "tritonllm.sampling_params is tritonllm.config.sampling_params now" in done.stderr and done.returncode
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "tritonllm.engine.transfer.params\n"


@pytest.mark.parametrize(
    ("module", "old", "new"),
    [
        ("tritonllm.teach.xray.stages", "Recorder", "StageRecorder"),
        ("tritonllm.teach.tutorial.lesson", "Ask", "LessonQuestion"),
        ("tritonllm.teach.tutorial.lesson", "Show", "ValueTable"),
    ],
)
def test_classes_have_their_old_names_still(module, old, new):
    found = importlib.import_module(module)
    with pytest.warns(DeprecationWarning, match=f"{module}.{old} is {module}.{new} now"):
        assert getattr(found, old) is getattr(found, new)
    with pytest.raises(AttributeError, match=r"has no attribute 'Nothing'"):
        found.Nothing  # noqa: B018


def test_the_names_of_the_module_of_configurations():
    config = importlib.import_module("tritonllm.config")
    for name, home in config._HOME.items():
        assert getattr(config, name) is getattr(importlib.import_module(f"tritonllm.config.{home}"), name)
    with pytest.raises(AttributeError, match=r"'tritonllm.config' has no attribute 'Nothing'"):
        config.Nothing  # noqa: B018
