"""(role, name, machine) -> class. To add a role: a file of your own and one ``register`` call; nothing here changes.

    from mok_cute.templates import registry
    registry.register("activation", "geglu", ("sm_90a",), "my_package.geglu:GeGLU")

and build with ``KernelConfig(roles=(("activation", "geglu"),))``. Classes are named by text and imported when a kernel
is traced, so that listing them needs no compiler.
"""

from __future__ import annotations

import hashlib
from importlib import import_module
from pathlib import Path
from typing import Any

from mok_cute.errors import ConfigError, UnsupportedError
from mok_cute.templates.interface import Plan

HOPPER = ("sm_90a",)
BLACKWELL = ("sm_100a", "sm_103a")
# What is used where KernelConfig.roles names nothing else.
DEFAULTS = {
    "dispatch": "pull",
    "scheduler": "tickets",
    "load": "tma",
    "multiply": "tensor_core",
    "activation": "swiglu",
    "epilogue": "chunks",
    "store": "chunks",
    "push": "rows",
    "reduce": "weighted_sum",
}

_CLASSES: dict[tuple[str, str, str], str] = {}


def register(role: str, name: str, machines: tuple[str, ...], target: str) -> None:
    """Make ``module:Class`` known as ``name`` of ``role``. Raises ConfigError for an unknown role or a taken name."""
    if role not in DEFAULTS:
        raise ConfigError(f"role={role!r}: unknown; choose one of {', '.join(DEFAULTS)}.")
    for machine in machines:
        taken = _CLASSES.setdefault((role, name, machine), target)
        if taken != target:
            raise ConfigError(f"name={name!r}: role {role} has it on {machine} already ({taken}); choose another name.")


def find(plan: Plan, role: str) -> type[Any]:
    """The class of a role for this plan. Raises UnsupportedError with the reason when there is none that fits."""
    name = dict(plan.config.roles).get(role, DEFAULTS[role])
    target = _CLASSES.get((role, name, plan.arch.name))
    if target is None:
        known = sorted(n for r, n, machine in _CLASSES if r == role and machine == plan.arch.name)
        raise UnsupportedError(
            f"KernelConfig.roles: {role}={name!r} is not built for {plan.arch.name}; "
            f"choose one of {', '.join(known) or 'none'}, or another arch."
        )
    module, _, attribute = target.partition(":")
    found: type[Any] = getattr(import_module(module), attribute)
    reason = found.unsupported_reason(plan)
    if reason is not None:
        raise UnsupportedError(f"{role} {name}: {reason}")
    return found


def make(plan: Plan, role: str) -> Any:
    return find(plan, role)(plan)


def foreign_sources(plan: Plan) -> dict[str, str]:
    """sha256 of the source files of roles that are not ours, for the key of compiled kernels."""
    digests = {}
    for role, default in DEFAULTS.items():
        name = dict(plan.config.roles).get(role, default)
        module = _CLASSES.get((role, name, plan.arch.name), "").partition(":")[0]
        if module and not module.startswith("mok_cute."):
            file = import_module(module).__file__
            assert file is not None, f"{module} has no source file, and the compiler reads it"
            digests[f"{role}:{name}"] = hashlib.sha256(Path(file).read_bytes()).hexdigest()
    return digests


def names() -> list[tuple[str, str, str, str]]:
    """(role, name, machine, class) of everything registered."""
    return [(*key, target) for key, target in sorted(_CLASSES.items())]


def _ours() -> None:
    package = "mok_cute.templates"
    both = HOPPER + BLACKWELL
    for role, name, machines, target in (
        ("dispatch", "pull", both, "dispatch.pull:PullDispatch"),
        ("scheduler", "tickets", HOPPER, "scheduler.dynamic:TicketScheduler"),
        ("scheduler", "tickets", BLACKWELL, "scheduler.clusters:ClusterTickets"),
        ("scheduler", "launch_control", BLACKWELL, "scheduler.clusters:LaunchControl"),
        ("load", "tma", HOPPER, "grouped_gemm.mainloop_sm90:Sm90Load"),
        ("load", "tma", BLACKWELL, "grouped_gemm.mainloop_sm100:Sm100Load"),
        ("multiply", "tensor_core", HOPPER, "grouped_gemm.mainloop_sm90:Sm90Multiply"),
        ("multiply", "tensor_core", BLACKWELL, "grouped_gemm.mainloop_sm100:Sm100Multiply"),
        ("activation", "swiglu", both, "swiglu.forward:SwiGLU"),
        ("epilogue", "chunks", both, "epilogue.store:Epilogue"),
        ("store", "chunks", both, "epilogue.store:StoreWarp"),
        ("push", "rows", both, "combine.push:PushCombine"),
        ("reduce", "weighted_sum", both, "combine.reduce:ReduceCombine"),
    ):
        register(role, name, machines, f"{package}.{target}")


_ours()
