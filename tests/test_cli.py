"""The command line: exit codes, pure JSON on standard output, options, case files."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fake_layer import make_fake
from rich.console import Console

import mok_cute
from mok_cute import checking, cli, problem
from mok_cute.config import RunConfig
from mok_cute.errors import ConfigError, UnsupportedError

SMALL = ["--hidden=128", "--intermediate=128", "--experts=4", "--shared=128", "--tokens=64"]


@pytest.fixture
def fake_gpu(monkeypatch: pytest.MonkeyPatch):
    """Lets check run on the CPU with the fake layer; returns a function that chooses the fault."""
    problem.WEIGHTS.clear()
    problem.EXPECTED.clear()
    monkeypatch.setattr(cli, "require_device", lambda device: None)
    build = cli.check_request_of

    def on_cpu(args: argparse.Namespace) -> problem.CheckRequest:
        from dataclasses import replace

        return replace(build(args), device="cpu")

    monkeypatch.setattr(cli, "check_request_of", on_cpu)

    def use(fault: str | None) -> None:
        module, _ = make_fake(fault)
        monkeypatch.setitem(sys.modules, "mok_cute.functional", module)
        monkeypatch.setitem(vars(mok_cute), "functional", module)

    use(None)
    return use


def run_json(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, Any]]:
    code = cli.main([*arguments, "--json"])
    out = capsys.readouterr().out
    assert out.count("\n") == 1, out
    return code, json.loads(out)


def parsed(*arguments: str) -> argparse.Namespace:
    return cli.build_parser().parse_args(arguments)


@pytest.mark.parametrize(
    ("fault", "code"), [(None, 0), ("wrong", 1), ("nan", 1), ("random", 1), ("timeout", 4), ("memory", 3)]
)
def test_check_exits_with_the_code_of_what_happened(fault: str | None, code: int, fake_gpu: Any, capsys: Any):
    fake_gpu(fault)
    got, document = run_json(capsys, "check", *SMALL)
    assert got == code
    assert document["ok"] is (code == 0)
    if code in (0, 1):
        assert {"ok", "deterministic", "launches", "results", "wall_seconds", "config"} <= set(document)
        assert {"max_abs", "rel_l1", "error_vs_torch_bf16", "sha256"} <= set(document["results"]["y"])
    else:
        assert document["error"]["exit_code"] == code
    if code == 4:
        assert document["error"]["report"]["signal"] == "x_routed_ready"


def test_check_prints_a_table_for_people(fake_gpu: Any, capsys: Any):
    assert cli.main(["check", *SMALL]) == 0
    out = capsys.readouterr().out
    assert "error vs torch bf16" in out and "ok" in out


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["paint"],
        ["check", "--tokens", "many"],
        ["check", "--tokens", "1,2"],
        ["check", "--tokens=-1"],
        ["check", "--rank", "1"],
        ["check", "--ranks", "0"],
        ["check", "--shape", "huge"],
        ["check", "--precision", "fp4"],
        ["check", "--device", "tpu"],
        ["check", "--routing", "wild"],
        ["check", "--routing", "file:/no/such/file"],
        ["check", "--minibatch", "100"],
        ["check", "--minibatch", "0"],
        ["check", "--minibatch", "256", "--macrobatch", "384"],
        ["check", "--comm-sms", "0"],
        ["check", "--schedule-seeds", "4"],
        ["check", "--schedule-seed", "4"],
        ["check", "--schedule-seeds", "0", "--device", "virtual:sm_90a"],
        ["check", "--schedule-seed=-1", "--device", "virtual:sm_90a"],
        ["check", "--schedule-seed", "1", "--schedule-seeds", "2", "--device", "virtual:sm_90a"],
        ["check", "--experts", "8", "--local-experts", "8"],
        ["check", "--cases", "/no/such/file"],
        ["compile", "--arch", "sm_80"],
        ["cache", "burn"],
    ],
)
def test_usage_errors_exit_2(arguments: list[str], capsys: Any):
    code, document = run_json(capsys, *arguments)
    assert (code, document["ok"]) == (2, False)
    assert document["error"]["message"]


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["check", "--precision", "mxfp8"], "--precision mxfp8"),
        (["check", "--direction", "backward"], "--direction backward"),
        (["check", "--direction", "both"], "--direction both"),
        (["check", "--hidden", "200"], "hidden=200"),
        (["compile", "--precision", "mxfp8"], "--precision mxfp8"),
        (["compile", "--intermediate", "72"], "intermediate=72"),
        (["explain", "--precision", "mxfp8"], "--precision mxfp8"),
    ],
)
def test_unsupported_requests_exit_3_and_name_the_argument(arguments: list[str], named: str, capsys: Any):
    code, document = run_json(capsys, *arguments)
    assert code == 3
    assert named in document["error"]["message"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_check_exits_3_when_there_is_no_gpu(capsys: Any):
    code, document = run_json(capsys, "check")
    assert code == 3
    assert "--device cuda" in document["error"]["message"]


def test_errors_go_to_stderr_when_json_is_not_asked_for(capsys: Any):
    assert cli.main(["check", "--hidden", "200"]) == 3
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "hidden=200" in captured.err


def test_stdout_is_one_object_when_libraries_write_to_it(fake_gpu: Any, capfd: Any, monkeypatch: pytest.MonkeyPatch):
    original = checking.run_check

    def noisy(request: problem.CheckRequest, say: Any) -> checking.CheckResult:
        print("from python")
        os.write(1, b"from below python\n")
        return original(request, say)

    monkeypatch.setattr(checking, "run_check", noisy)
    assert cli.main(["check", *SMALL, "--json"]) == 0
    captured = capfd.readouterr()
    assert json.loads(captured.out)["ok"] is True
    assert "from python" in captured.err and "from below python" in captured.err


def test_cases_give_one_line_each_and_the_worst_code(fake_gpu: Any, capsys: Any, tmp_path: Path):
    cases = [
        {"tokens": 64},
        {"hidden": 200},
        {"tokens": [1, 2]},
        {"colour": "red"},
        {"tokens": [64, 32], "ranks": 2, "comm_sms": 2, "json": True, "save": None},
    ]
    path = tmp_path / "cases.json"
    path.write_text(json.dumps(cases))
    assert cli.main(["check", *SMALL, "--cases", str(path)]) == 3
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["exit_code"] for line in lines] == [0, 3, 2, 2, 0]
    assert [line["case"] for line in lines] == cases
    assert lines[-1]["config"]["tokens"] == [64, 32]
    assert lines[-1]["config"]["run"]["comm_sms"] == 2
    assert lines[0]["config"]["shape"]["hidden"] == 128  # options beside --cases are every case's defaults


@pytest.mark.parametrize("text", ["{", "{}", "[1]", '[{"cases": "x"}]'])
def test_cases_file_that_is_no_list_of_options_exits_2(text: str, capsys: Any, tmp_path: Path):
    path = tmp_path / "cases.json"
    path.write_text(text)
    assert cli.main(["check", "--cases", str(path), "--json"]) == 2
    assert json.loads(capsys.readouterr().out)["ok"] is False


def test_shape_options_override_the_preset():
    shape = cli.shape_of(parsed("check", "--shape", "qwen3.5", "--local-experts", "16", "--ranks", "3", "--topk", "4"))
    assert (shape.hidden, shape.num_experts, shape.topk, shape.shared_factor) == (4096, 48, 4, True)
    assert cli.shape_of(parsed("check", "--shape", "qwen3.5", "--shared", "512")).shared_factor
    none = cli.shape_of(parsed("check", "--shape", "qwen3.5", "--shared", "0"))
    assert (none.shared_intermediate, none.shared_factor) == (0, False)
    assert not cli.shape_of(parsed("check", "--shape", "qwen3-30b", "--shared", "256")).shared_factor
    assert cli.shape_of(parsed("check", "--swiglu-limit", "0")).swiglu_limit == 0.0
    assert cli.shape_of(parsed("check")).name == "tiny"


@pytest.mark.parametrize(
    ("given", "seeds"),
    [
        ([], (0, 1)),
        (["--schedule-seeds=3"], (0, 1, 2)),
        (["--schedule-seeds=1"], (0, 0)),
        (["--schedule-seed=5"], (5, 5)),
    ],
)
def test_a_check_runs_at_least_twice_whatever_orders_are_asked_for(given: list[str], seeds: tuple[int, ...]):
    assert cli.schedule_seeds_of(parsed("check", "--device=virtual:sm_90a", *given)) == seeds


def test_one_count_of_tokens_is_every_ranks():
    assert cli.tokens_of("7", 3) == (7, 7, 7)
    assert cli.tokens_of("1,0,2", 3) == (1, 0, 2)


@pytest.mark.parametrize("given", [[], ["--minibatch", "384"], ["--macrobatch", "128"], ["--macrobatch", "8320"]])
def test_one_ring_size_alone_is_completed_to_a_valid_pair(given: list[str]):
    run = cli.run_config_of(parsed("check", *given))
    assert run.macrobatch % run.minibatch == 0
    assert isinstance(run, RunConfig)


def test_case_options_are_spelled_like_on_the_command_line():
    case = {"tokens": [1, 2], "comm_sms": 4, "shape": "tiny", "json": True, "save": None, "swiglu-limit": 1.5}
    assert cli.case_arguments(case) == ["--tokens=1,2", "--comm-sms=4", "--shape=tiny", "--json", "--swiglu-limit=1.5"]
    with pytest.raises(ConfigError):
        cli.case_arguments({"cases": "again"})


def test_json_has_no_bare_nan():
    assert cli.plain({"a": [float("nan"), float("inf"), 1.5], "p": Path("x")}) == {"a": ["nan", "inf", 1.5], "p": "x"}


def test_explain_prints_all_sections(capsys: Any):
    code, document = run_json(capsys, "explain", "--shape", "deepseek-v3", "--ranks", "8", "--tokens", "4096")
    assert code == 0
    assert {"sizes", "phases", "order", "signals", "workspace"} <= set(document)
    assert cli.main(["explain"]) == 0
    assert "gate_up" in capsys.readouterr().out


def test_doctor_reports_and_exits_0(capsys: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("MOK_CUTE_TIMEOUTS", "3")
    code, document = run_json(capsys, "doctor")
    assert code == 0
    assert any("MOK_CUTE_TIMEOUTS" in finding for finding in document["findings"])
    assert {row["package"] for row in document["packages"]} >= {"torch", "nvidia-cutlass-dsl"}
    assert document["compiler"]["importable"] and document["compiler"]["cuda"]
    assert document["cache"]["writable"] in (True, False)
    assert cli.main(["doctor"]) == 0


def test_doctor_exits_0_when_a_setting_is_invalid(capsys: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("MOK_CUTE_TIMEOUT_S", "soon")
    code, document = run_json(capsys, "doctor")
    assert code == 0
    assert any("MOK_CUTE_TIMEOUT_S" in finding for finding in document["findings"])


@pytest.mark.parametrize(
    ("version", "tested", "inside"),
    [
        ("2.13.0+cpu", ">=2.10", True),
        ("4.9.0", ">=4.8.1,<4.9", False),
        ("4.8.1", "<4.9,>=4.8.1", True),
        ("1", "", True),
    ],
)
def test_versions_are_compared_with_the_tested_range(version: str, tested: str, inside: bool):
    from mok_cute.doctor import is_inside

    assert is_inside(version, tested) is inside


def test_cache_lists_verifies_and_clears(capsys: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("MOK_CUTE_CACHE_DIR", str(tmp_path))
    for action, key in (("list", "entries"), ("verify", "entries"), ("clear", "removed")):
        code, document = run_json(capsys, "cache", action)
        assert code == 0
        assert not document[key]


def test_demo_says_that_no_kernel_ran_when_there_is_no_gpu(capsys: Any, monkeypatch: pytest.MonkeyPatch):
    def refuse(device: str) -> None:
        raise UnsupportedError("--device cuda: none here.")

    monkeypatch.setattr(cli, "require_device", refuse)
    monkeypatch.setattr(
        cli, "compile_document", lambda shape, *_: {"ok": True, "arch": "sm_90a", "shape": {"name": "s"}}
    )
    outcome = cli.demo(parsed("demo"))
    assert (outcome.exit_code, outcome.json["kernel_ran"]) == (0, False)
    assert outcome.json["protocol_model"]["ok"] and outcome.json["explain"]["order"]
    assert outcome.show is not None
    outcome.show(Console())
    assert "No kernel ran: --device cuda: none here." in capsys.readouterr().out


class FakeFigures:
    def to_json(self) -> dict[str, Any]:
        return {
            "registers": 168,
            "spill_bytes": 0,
            "smem_bytes": 230000,
            "tmem_columns": 0,
            "instructions": {"wgmma": 4},
        }


def test_compile_reports_figures_and_writes_files(capsys: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    asked = []

    def compile_forward(shape: Any, config: Any, arch_name: str, local_experts: int) -> SimpleNamespace:
        asked.append((shape.num_experts, arch_name, local_experts))
        return SimpleNamespace(figures=FakeFigures(), ptx=".version", cubin=b"elf", compile_seconds=1.5, cached=False)

    monkeypatch.setitem(sys.modules, "mok_cute.compile", SimpleNamespace(compile_forward=compile_forward))
    out = tmp_path / "new"
    code, document = run_json(capsys, "compile", "--local-experts", "3", "--ranks", "2", "--out", str(out))
    assert code == 0
    assert asked == [(6, "sm_90a", 3)]
    assert {"registers", "spill_bytes", "smem_bytes", "tmem_columns", "instructions"} <= set(document)
    assert (document["compile_seconds"], document["cached"]) == (1.5, False)
    assert Path(document["files"]["ptx"]).read_text() == ".version"
    assert Path(document["files"]["cubin"]).read_bytes() == b"elf"
    assert cli.main(["compile"]) == 0
    assert "wgmma" in capsys.readouterr().out


def test_compile_builds_a_small_shape_without_a_gpu(capsys: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("MOK_CUTE_CACHE_DIR", str(tmp_path / "cache"))
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    code, document = run_json(capsys, "compile", "--shape", "tiny", "--out", str(tmp_path))
    assert code == 0, document
    assert document["registers"] > 0 and document["smem_bytes"] > 0
    assert any(opcode.startswith("wgmma") for opcode in document["instructions"])
    assert ".target sm_90a" in (tmp_path / "forward_sm_90a.ptx").read_text()
    assert (tmp_path / "forward_sm_90a.cubin").read_bytes()[:4] == b"\x7fELF"
    assert not list((tmp_path / "here").iterdir()), "the compiler's own files stay out of the current folder"


def test_module_runs_as_a_program():
    done = subprocess.run([sys.executable, "-m", "mok_cute", "--version"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, f"mok-cute {mok_cute.__version__}\n")
