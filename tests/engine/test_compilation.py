"""Listing and compiling kernels without a GPU. Not in tests/kernels: the interpreter there compiles nothing."""

import json
import shutil
import tempfile
from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl
from support.foreign_files import what_is
from triton import knobs
from triton.runtime import cache
from triton.runtime.jit import JITFunction

from tritonllm.kernels import rms_norm, silu_and_mul
from tritonllm.kernels.compile import cache_folder, extensions
from tritonllm.kernels.compile.aot import pretend, target_of
from tritonllm.kernels.compile.extensions import driver_extensions
from tritonllm.kernels.compile.monitor import MONITOR
from tritonllm.kernels.compile.parallel import compile_in_parallel, list_kernels
from tritonllm.kernels.runtime.meta_mode import MetaMode

EXTENSIONS = {"3.6": {"cuda_utils", "__triton_launcher"}, "3.7": {"cuda_utils"}}  # built where there is no libcuda
BF16, FP16 = torch.bfloat16, torch.float16


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    """Triton's cache is empty, and what a test changes about it is as before afterwards."""
    monkeypatch.setattr(cache, "triton_key", cache.triton_key)
    with knobs.cache.scope(), knobs.compilation.scope():
        knobs.cache.dir = str(tmp_path / "own")
        yield tmp_path / "own"


def meta(*shape, dtype=BF16):
    return torch.empty(*shape, dtype=dtype, device="meta")


def norms(arch=90, dtypes=(BF16,)):
    with pretend(target_of(arch)), list_kernels() as found:
        for dtype in dtypes:
            rms_norm(meta(4, 64, dtype=dtype), meta(64, dtype=dtype))
    return found


def compiled_here(specialization):
    """Ask for a kernel as a launch would; returns whether it was compiled rather than found."""
    before = MONITOR.compiled, MONITOR.loaded
    triton.compile(specialization.source, target=specialization.target, options=specialization.options.__dict__)
    after = MONITOR.compiled - before[0], MONITOR.loaded - before[1]
    assert after in ((1, 0), (0, 1))
    return after == (1, 0)


def test_lists_each_kernel_once():
    with pretend(target_of(90)), list_kernels() as found:
        for rows in (4, 8, 4):
            rms_norm(meta(rows, 64), meta(64))
        assert len(found) == 1
        rms_norm(meta(4, 64, dtype=FP16), meta(64, dtype=FP16))
        silu_and_mul(meta(4, 64))
    assert [kernel.name for kernel in found] == ["_norm_kernel", "_norm_kernel", "_activation_kernel"]


def test_lists_again_in_another_block():
    with pretend(target_of(90)):
        for _ in range(2):
            with list_kernels() as found:
                rms_norm(meta(4, 64), meta(64))
            assert [kernel.name for kernel in found] == ["_norm_kernel"]


def test_lists_what_the_alignment_of_pointers_asks_for():
    with pretend(target_of(90)), list_kernels() as found:
        silu_and_mul(meta(4 * 64).view(4, 64))
        silu_and_mul(meta(4 * 64 + 1)[1:].view(4, 64))
    assert len(found) == 2


def test_lists_nothing_outside():
    hook = knobs.runtime.jit_cache_hook
    found = norms()
    rms_norm(meta(3, 80), meta(80))
    assert len(found) == 1 and knobs.runtime.jit_cache_hook is hook
    with pytest.raises(ZeroDivisionError), pretend(target_of(90)), list_kernels():
        raise ZeroDivisionError
    assert knobs.runtime.jit_cache_hook is hook


def test_a_launch_finds_what_was_listed(monkeypatch):
    """Same name in the cache, so the list has every option as the launch has it."""
    compile_in_parallel(norms())
    run, before = JITFunction.run, (MONITOR.compiled, MONITOR.loaded)
    monkeypatch.setattr(
        JITFunction, "run", lambda self, *args, **options: run(self, *args, **options | {"warmup": True})
    )
    with pretend(target_of(90)), MetaMode():
        rms_norm(meta(4, 64), meta(64))
    assert (MONITOR.compiled, MONITOR.loaded) == (before[0], before[1] + 1)


def test_compiles_what_is_missing(own_cache):
    found = norms(dtypes=(BF16, FP16))
    assert not any(kernel.is_cached() for kernel in found)
    compile_in_parallel(found[:1], workers=1)
    assert [kernel.is_cached() for kernel in found] == [True, False]
    compile_in_parallel([*found, *driver_extensions()])
    assert all(kernel.is_cached() for kernel in found) and all(
        extension.is_cached() for extension in driver_extensions()
    )
    assert not any(compiled_here(kernel) for kernel in found)
    written = {path: path.stat().st_mtime_ns for path in own_cache.rglob("*")}
    built = {path.name.split(".")[0] for path in written if path.suffix == ".so"}
    assert built == EXTENSIONS.get(triton.__version__[:3], set())
    compile_in_parallel([*found, *driver_extensions()])
    assert {path: path.stat().st_mtime_ns for path in own_cache.rglob("*")} == written
    assert not norms(arch=100)[0].is_cached()


def test_a_library_for_the_linker_is_made_once_and_leaves_nothing_behind(own_cache, tmp_path, monkeypatch):
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    make = extensions._stand_in_for_libcuda.__wrapped__  # as another process
    (folder,) = make()
    monkeypatch.setattr(extensions.subprocess, "run", lambda *args, **kwargs: pytest.fail("made again"))
    assert make() == (folder,)
    assert [path.name for path in Path(folder).iterdir()] == ["libcuda.so.1"] and own_cache in Path(folder).parents
    assert not list((tmp_path / "temporary").iterdir())


@triton.jit
def _inner(x):
    return x + 1


@triton.jit
def _outer(x):
    return _inner(x) * _inner(x + 2)


@triton.jit
def _short_kernel(x_ptr):
    tl.store(x_ptr, _outer(tl.load(x_ptr)))


def test_a_kernel_costs_what_it_calls():
    """Each function once, however often and from wherever it is called."""
    with pretend(target_of(90)), list_kernels() as found:
        _short_kernel[(1,)](meta(16))
    assert found[0].cost == sum(len(fn.src) for fn in (_short_kernel, _outer, _inner))


@triton.jit
def _wrong_kernel(x_ptr, N: tl.constexpr):
    tl.store(x_ptr + tl.arange(0, N), tl.arange(0, 2 * N))


def test_an_error_comes_out_after_the_others_are_compiled():
    with pretend(target_of(90)), list_kernels() as found:
        _wrong_kernel[(1,)](meta(16), N=16)
        rms_norm(meta(4, 64), meta(64))
    with pytest.raises(triton.CompilationError):
        compile_in_parallel(found)
    assert [kernel.is_cached() for kernel in found] == [False, True]


def test_a_folder_of_kernels_can_be_moved(own_cache, tmp_path):
    found = norms()
    cache_folder.write_kernels_to(tmp_path / "made")
    compile_in_parallel(found)
    shutil.move(tmp_path / "made", tmp_path / "moved")
    cache_folder.write_kernels_to(tmp_path / "moved")  # goes on where the other left off
    assert found[0].is_cached()
    knobs.cache.dir = str(own_cache)
    cache_folder.read_kernels_from(tmp_path / "moved")
    assert found[0].is_cached() and not compiled_here(found[0])
    assert not own_cache.exists()  # a start with all its kernels writes nothing
    other = norms(dtypes=(FP16,))[0]  # is not there: compiled as ever, into Triton's own cache
    before = sorted((tmp_path / "moved").rglob("*"))
    assert compiled_here(other) and not compiled_here(other)
    assert sorted((tmp_path / "moved").rglob("*")) == before
    assert any(own_cache.rglob("*.cubin"))


def test_a_folder_that_does_not_fit_is_refused(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="was not made by `tritonllm precompile`"):
        cache_folder.read_kernels_from(tmp_path)
    monkeypatch.setattr(cache_folder, "portable_triton_key", lambda: "another compiler")
    cache_folder.write_kernels_to(tmp_path)
    monkeypatch.undo()
    with pytest.raises(ValueError, match=r"made with Triton .*make it again"):
        cache_folder.read_kernels_from(tmp_path)
    assert cache.triton_key is not cache_folder.portable_triton_key


def test_only_files_beside_their_list_are_removed(tmp_path):
    """Which may say anything in a folder that somebody else has made."""
    folder, elsewhere = tmp_path / "kernels", tmp_path / "elsewhere"
    names = ["k.ptx", "k.cubin", "../kept", f"{tmp_path}/kept"]
    for where in (folder / "ab", elsewhere):
        where.mkdir(parents=True)
        (where / "__grp__k.json").write_text(json.dumps({"child_paths": dict.fromkeys(names, "")}))
        for name in ("k.ptx", "k.cubin"):
            (where / name).touch()
    for kept in (folder / "kept", tmp_path / "kept"):
        kept.touch()
    (folder / "cd").symlink_to(elsewhere)
    (folder / "ef").mkdir()
    (folder / "ef" / "__grp__k.json").symlink_to(elsewhere / "__grp__k.json")
    before = what_is(elsewhere)
    cache_folder.keep_binaries(folder)
    assert sorted(path.name for path in (folder / "ab").iterdir()) == ["__grp__k.json", "k.cubin"]
    assert (folder / "kept").exists() and (tmp_path / "kept").exists() and what_is(elsewhere) == before


def test_the_monitor_leaves_others_their_turn():
    seen = []
    with knobs.compilation.scope():
        knobs.compilation.listener = lambda **info: seen.append(info["cache_hit"])
        monitor = type(MONITOR)()
        assert compiled_by(monitor, norms()[0]) == (1, 0)
        assert compiled_by(monitor, norms()[0]) == (1, 1)
    assert seen == [False, True]


def compiled_by(monitor, specialization):
    triton.compile(specialization.source, target=specialization.target, options=specialization.options.__dict__)
    return monitor.compiled, monitor.loaded
