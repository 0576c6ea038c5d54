"""The whole forward on virtual Blackwell GPUs: hard cases in several orders of events, without a finding.

``mok-cute check`` judges each case: errors against bf16 torch, equal bits in all runs, the schedule, the launches.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from blackwell_cases import CASES, HARD, KERNELS, RUN_SMS, RUNS, SHORT, TINY, write_routing

from mok_cute import cli
from mok_cute.checking import CheckResult, run_check
from mok_cute.emulator.virtual_device import DEFAULT_SMS, VirtualDevice
from mok_cute.problem import CheckRequest

pytestmark = pytest.mark.emulated

ORDERS = 2  # of events, in each of which a case runs once
HARD_ORDERS = 20


def request_of(options: dict[str, Any], arch: str, kernel: str, orders: int, folder: Path) -> CheckRequest:
    options = {**options, "device": f"virtual:{arch}", "schedule_seeds": orders}
    if options.get("routing") == "file":
        shape = cli.shape_of(parsed({**options, "routing": "random"}))
        path = folder / "routing.safetensors"
        write_routing(path, shape, int(options["tokens"]), options["ranks"])
        options["routing"] = f"file:{path}"
    request = cli.check_request_of(parsed(options))
    return replace(request, config=None if kernel == "default" else KERNELS[kernel].config(arch))


def parsed(options: dict[str, Any]) -> Any:
    return cli.build_parser().parse_args(["check", *cli.case_arguments(options)])


def checked(request: CheckRequest, num_sms: int = DEFAULT_SMS) -> CheckResult:
    assert request.device.startswith("virtual:")
    with VirtualDevice.of_name(request.device, num_sms=num_sms):
        result = run_check(request)
    assert result.findings == () and result.ok and result.deterministic and result.schedule_exact
    assert result.launches == {"schedule": 3, "forward": 1, "backward": 0}
    return result


def short_run() -> list[Any]:
    return [(arch, case, kernel) for arch, chosen in SHORT.items() for case, kernel in chosen]


def long_run() -> list[Any]:
    """Every case on every kernel of sm_100a, and on each machine's default kernel."""
    every = [("sm_100a", case, kernel) for case in CASES for kernel in KERNELS]
    every += [(arch, case, "default") for arch in ("sm_100a", "sm_103a", "sm_90a") for case in CASES]
    return [one for one in every if one not in short_run()]


@pytest.mark.parametrize(("arch", "case", "kernel"), short_run())
def test_forward_is_right_in_every_order_of_events(arch: str, case: str, kernel: str, tmp_path: Path) -> None:
    checked(request_of(CASES[case], arch, kernel, ORDERS, tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize(("arch", "case", "kernel"), long_run())
def test_forward_is_right_in_all_cases(arch: str, case: str, kernel: str, tmp_path: Path) -> None:
    checked(request_of(CASES[case], arch, kernel, ORDERS, tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["sm_100a", "sm_103a"])
@pytest.mark.parametrize("name", HARD)
def test_hard_case_is_right_in_twenty_orders_of_events(name: str, arch: str, tmp_path: Path) -> None:
    case, kernel = HARD[name]
    checked(request_of(CASES[case], arch, kernel, HARD_ORDERS, tmp_path))


def bits_of_runs(problem: dict[str, Any], kernel: str, runs: tuple[dict[str, Any], ...], folder: Path) -> set[str]:
    bits = set()
    for run in runs:
        result = checked(request_of({**problem, **run}, "sm_100a", kernel, ORDERS, folder), RUN_SMS)
        bits.add(result.results["y"]["sha256"])
    return bits


def test_run_configurations_give_the_same_bits(tmp_path: Path) -> None:
    runs = (RUNS[0], RUNS[2], RUNS[4])
    assert len(bits_of_runs({**TINY, "tokens": "257,64", "ranks": 2}, "pair-tickets", runs, tmp_path)) == 1


@pytest.mark.slow
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(
    "problem",
    [
        {**TINY, "tokens": "300", "ranks": 1},
        {**TINY, "tokens": "300,170", "ranks": 2, "routing": "zipf"},
        {**TINY, "tokens": "128,257,0,70", "ranks": 4, "routing": "all-to-one"},
    ],
    ids=lambda problem: f"{problem['ranks']}-ranks",
)
def test_all_run_configurations_give_the_same_bits(problem: dict[str, Any], kernel: str, tmp_path: Path) -> None:
    assert len(bits_of_runs(problem, kernel, RUNS, tmp_path)) == 1
