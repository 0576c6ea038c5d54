"""The cache of compiled kernels: one build for many processes, damage seen and repaired, every input in the key."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import cutlass
import cutlass.cute as cute
import pytest
from cutlass import Float32, Int32, Int64

from mok_cute import cache
from mok_cute.errors import CompileError, ConfigError, UnsupportedError
from mok_cute.settings import Settings

ARCHS = ("sm_90a", "sm_100a")


@cute.kernel
def fill(address: Int64, count: Int32):
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    cute.arch.sync_threads()
    i = block * 128 + thread
    if i < count:
        cute.arch.store(cute.make_ptr(Float32, address + Int64(i) * 4, cutlass.AddressSpace.gmem), Float32(1.0))


@cute.jit
def launch_fill(address: Int64, count: Int32):
    fill(address, count).launch(grid=(cute.ceil_div(count, 128), 1, 1), block=(128, 1, 1))


def compile_fill(arch: str, dumps: Path) -> Any:
    options = f"--gpu-arch {arch} --enable-tvm-ffi --keep-ptx --keep-cubin --dump-dir {dumps}"
    return cute.compile(launch_fill, Int64(8), Int32(1), options=options)


class Builder:
    """Counts how often it compiled."""

    def __init__(self, arch: str = "sm_90a") -> None:
        self.arch = arch
        self.calls = 0

    def __call__(self, dumps: Path) -> Any:
        self.calls += 1
        return compile_fill(self.arch, dumps)


@pytest.fixture(autouse=True)
def fresh_process_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the process had just started, so that a hit comes from the disk."""
    monkeypatch.setattr(cache, "_MEMO", {})
    monkeypatch.setattr(cache, "_USABLE", {})
    cache.process_fingerprint.cache_clear()


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(cache_dir=tmp_path / "cache")


def get(settings: Settings, builder: Builder, **inputs: Any) -> cache.LoadedKernels:
    return cache.get_or_build(inputs or {"n": 1}, builder.arch, {"fill": builder}, settings)


def forget_in_process() -> None:
    cache._MEMO.clear()


@pytest.mark.parametrize("arch", ARCHS)
def test_cache_loads_the_same_kernel_when_asked_again(arch: str, settings: Settings) -> None:
    builder = Builder(arch)
    first = get(settings, builder)
    forget_in_process()
    second = get(settings, builder)
    assert (first.cached, second.cached, builder.calls) == (False, True, 1)
    assert first.ptx == second.ptx and f".target {arch}" in first.ptx["fill"]
    assert first.cubin == second.cubin and first.figures == second.figures
    assert first.compile_seconds == second.compile_seconds > 0
    assert first.figures["fill"].instructions == {"bar.sync": 1}
    assert callable(second.functions["fill"])


def test_cache_keeps_functions_in_the_process_when_asked_again(settings: Settings) -> None:
    builder = Builder()
    first = get(settings, builder)
    cache_files = list((settings.cache_dir or Path()).rglob("*.o"))
    for file in cache_files:
        file.unlink()
    second = get(settings, builder)
    assert second.functions["fill"] is first.functions["fill"]
    assert second.cached and builder.calls == 1


def test_cache_writes_nothing_when_it_is_off(tmp_path: Path) -> None:
    off = Settings(cache_dir=tmp_path / "cache", cache=False)
    builder = Builder()
    assert not get(off, builder).cached
    assert not (tmp_path / "cache").exists()
    assert get(off, builder).cached and builder.calls == 1  # kept in this process


WORKER = """
import importlib.util, json, sys, time
from pathlib import Path
from mok_cute import cache
from mok_cute.settings import Settings
spec = importlib.util.spec_from_file_location("case", sys.argv[1])
case = importlib.util.module_from_spec(spec)
sys.modules["case"] = case
spec.loader.exec_module(case)
got = {}
for arch in case.ARCHS:
    loaded = case.get(Settings(cache_dir=Path(sys.argv[2])), case.Builder(arch))
    got[arch] = [loaded.cached, loaded.figures["fill"].registers, loaded.ptx["fill"]]
print(json.dumps(got))
"""


def test_cache_compiles_once_when_eight_processes_start_together(settings: Settings) -> None:
    command = [sys.executable, "-c", WORKER, __file__, str(settings.cache_dir)]
    workers = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(8)]
    results = [json.loads(worker.communicate(timeout=300)[0]) for worker in workers]
    assert [worker.returncode for worker in workers] == [0] * 8
    for arch in ARCHS:
        assert sorted(result[arch][0] for result in results) == [False] + [True] * 7
        assert len({tuple(result[arch][1:]) for result in results}) == 1
    assert [entry.problem for entry in cache.verify(settings)] == [None, None]
    left = [path.name for path in (settings.cache_dir or Path()).iterdir() if len(path.name) != 64]
    assert left == ["locks"]


@pytest.mark.parametrize("name", ["fill.o", "fill.ptx", "fill.cubin", cache.SIDECAR])
@pytest.mark.parametrize("damage", ["cut", "flipped", "missing"])
def test_cache_builds_again_with_a_warning_when_a_file_is_damaged(name: str, damage: str, settings: Settings) -> None:
    builder = Builder()
    path = (settings.cache_dir or Path()) / get(settings, builder).key / name
    content = path.read_bytes()
    if damage == "cut":
        path.write_bytes(content[: len(content) // 2])
    elif damage == "flipped":
        half = len(content) // 2
        path.write_bytes(content[:half] + bytes([content[half] ^ 1]) + content[half + 1 :])
    else:
        path.unlink()
    forget_in_process()
    assert [entry.problem is None for entry in cache.verify(settings)] == [False]
    with pytest.warns(UserWarning, match="damaged"):
        assert not get(settings, builder).cached
    assert builder.calls == 2
    assert [entry.problem for entry in cache.verify(settings)] == [None]


def test_cache_refuses_an_entry_when_it_was_copied_to_another_key(settings: Settings) -> None:
    builder = Builder()
    root = settings.cache_dir or Path()
    one = get(settings, builder, n=1)
    other = cache.make_key({"n": 2}, "sm_90a", ["fill"], settings)
    (root / one.key).rename(root / other)
    with pytest.warns(UserWarning, match="another key"):
        get(settings, builder, n=2)


def test_cache_uses_a_private_folder_with_one_warning_when_its_own_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    blocked = Settings(cache_dir=tmp_path / "file" / "cache")
    builder = Builder()
    with pytest.warns(UserWarning, match="MOK_CUTE_CACHE_DIR") as caught:
        get(blocked, builder, n=1)
        get(blocked, builder, n=2)
        forget_in_process()
        assert get(blocked, builder, n=2).cached
    assert len(caught) == 1 and builder.calls == 2


def test_cache_uses_a_private_folder_when_another_user_owns_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    owner = 54321
    if os.getuid() == 0:
        os.chown(tmp_path, owner, -1)
    else:
        owner = os.getuid()
        monkeypatch.setattr(os, "getuid", lambda: owner + 1)
    with pytest.warns(UserWarning, match=f"belongs to user {owner}"):
        assert cache.cache_directory(Settings(cache_dir=tmp_path)) != tmp_path


def test_key_changes_when_anything_that_generates_code_changes(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    def key(inputs: dict[str, Any], arch: str = "sm_90a", names: tuple[str, ...] = ("fill",), **fields: Any) -> str:
        return cache.make_key(inputs, arch, names, replace(settings, **fields))

    base = {"shape": {"hidden": 256, "swiglu_limit": None}, "stages": 4}
    keys = [
        key(base),
        key({**base, "stages": 3}),
        key({**base, "shape": {"hidden": 256, "swiglu_limit": 7.0}}),
        key(base, "sm_100a"),
        key(base, names=("fill", "other")),
        key(base, compiler_environment=(("CUTE_DSL_LINEINFO", "1"),)),
    ]
    tools = cache.tool_versions()
    for tool in tools:
        monkeypatch.setattr(cache, "tool_versions", lambda tool=tool: {**tools, tool: "other"})
        keys.append(key(base))
    monkeypatch.setattr(cache, "tool_versions", lambda: tools)
    monkeypatch.setattr(cache, "process_fingerprint", lambda: "other")
    keys.append(key(base))
    assert len(set(keys)) == len(keys)


def test_key_stays_when_only_the_order_or_the_run_changes(settings: Settings) -> None:
    one = cache.make_key({"a": 1, "b": [1, 2]}, "sm_90a", ["f", "g"], settings)
    two = cache.make_key({"b": [1, 2], "a": 1}, "sm_90a", ["g", "f"], replace(settings, timeout_s=1.0, log="debug"))
    assert one == two


def test_key_refuses_inputs_that_are_not_json(settings: Settings) -> None:
    with pytest.raises(TypeError):
        cache.make_key({"fn": object()}, "sm_90a", ["f"], settings)


def test_fingerprint_changes_when_a_template_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import mok_cute.templates

    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "a.py").write_text("x = 1\n")
    monkeypatch.setattr(mok_cute.templates, "__path__", [str(tmp_path)])
    prints = [cache.source_fingerprint()]
    (tmp_path / "sub" / "a.py").write_text("x = 2\n")
    prints.append(cache.source_fingerprint())
    (tmp_path / "sub" / "a.py").rename(tmp_path / "a.py")
    prints.append(cache.source_fingerprint())
    assert len(set(prints)) == 3


def test_kernel_is_not_kept_when_sources_change_after_the_process_read_them(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    builder = Builder()
    cache.process_fingerprint()
    monkeypatch.setattr(cache, "source_fingerprint", lambda: "edited")
    with pytest.warns(UserWarning, match="sources changed"):
        assert callable(get(settings, builder).functions["fill"])
    assert cache.list_entries(settings) == []
    assert get(settings, builder).cached and builder.calls == 1  # this process goes on with what it has


def test_compile_error_keeps_the_compilers_words_and_leaves_no_entry(settings: Settings) -> None:
    def broken(dumps: Path) -> Any:
        raise RuntimeError("ptxas says no")

    with pytest.raises(CompileError, match="fill for sm_90a.*RuntimeError: ptxas says no"):
        cache.get_or_build({}, "sm_90a", {"fill": broken}, settings)
    assert cache.list_entries(settings) == []

    def refused(dumps: Path) -> Any:
        raise ConfigError("stages=9: too many")

    with pytest.raises(ConfigError, match="stages=9"):
        cache.get_or_build({}, "sm_90a", {"fill": refused}, settings)


def test_cache_refuses_a_machine_it_does_not_know(settings: Settings) -> None:
    with pytest.raises(UnsupportedError, match="arch=sm_80"):
        cache.get_or_build({}, "sm_80", {}, settings)


def test_cache_compiles_one_at_a_time_when_threads_ask_together(settings: Settings) -> None:
    builder = Builder()
    failures: list[BaseException] = []

    def ask(n: int) -> None:
        try:
            get(settings, builder, n=n % 2)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=ask, args=(n,)) for n in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures and builder.calls == 2


def test_clear_removes_what_a_killed_process_left_and_spares_builds_at_work(settings: Settings) -> None:
    root = cache.cache_directory(settings)
    dead, alive = root / "building-dead", root / "building-alive"
    dead.mkdir()
    alive.mkdir()
    os.utime(dead, (0, 0))
    assert cache.clear(settings) == 0
    assert (dead.exists(), alive.exists()) == (False, True)


def test_entries_are_listed_and_removed(settings: Settings) -> None:
    builder = Builder()
    keys = sorted(get(settings, builder, n=n).key for n in (1, 2))
    entries = cache.list_entries(settings)
    assert [entry.key for entry in entries] == keys
    assert all(e.arch == "sm_90a" and e.functions == ("fill",) and e.num_bytes > 0 for e in entries)
    assert cache.clear(settings, [keys[0]]) == 1
    assert [entry.key for entry in cache.list_entries(settings)] == keys[1:]
    assert cache.clear(settings) == 1 and cache.list_entries(settings) == []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not get(settings, builder, n=1).cached
