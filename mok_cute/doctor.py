"""What this machine and installation look like to mok_cute, with a sentence for whatever needs attention.

Nothing is changed, compiled or launched. A missing GPU is a finding, not an error: compiling works without one.
"""

from __future__ import annotations

import os
import platform
import re
import tempfile
import warnings
from importlib import metadata
from pathlib import Path
from typing import Any

from mok_cute.errors import ConfigError, MokError

PACKAGES = (
    "mok-cute",
    "torch",
    "nvidia-cutlass-dsl",
    "apache-tvm-ffi",
    "cuda-bindings",
    "numpy",
    "safetensors",
    "rich",
    "filelock",
    "platformdirs",
)
FLAVOURS = ("nvidia-cutlass-dsl-libs-cu12", "nvidia-cutlass-dsl-libs-cu13")
MIN_DRIVER = {"nvidia-cutlass-dsl-libs-cu12": (12, 0), "nvidia-cutlass-dsl-libs-cu13": (13, 0)}  # CUDA it must accept


def examine() -> dict[str, Any]:
    """Sections of facts, and under ``findings`` what stands out."""
    findings: list[str] = []
    return {
        "ok": True,
        "system": {"python": platform.python_version(), "platform": platform.platform(), "cpus": os.cpu_count()},
        "packages": _packages(findings),
        "dsl": _dsl_flavours(findings),
        "compiler": _compiler(findings),
        "gpu": _gpu(findings),
        "cache": _cache(findings),
        "settings": _settings(findings),
        "findings": findings,
    }


def tested_ranges() -> dict[str, str]:
    """Package -> the range that our own distribution declares; its pins are what the tests ran with."""
    try:
        lines = metadata.requires("mok-cute") or []
    except metadata.PackageNotFoundError:
        return {}
    matches = [re.match(r"([\w.-]+)(?:\[[^]]*\])?\s*\(?([^;)]*)", line) for line in lines if "extra ==" not in line]
    return {match[1]: match[2].strip() for match in matches if match}


def _packages(findings: list[str]) -> list[dict[str, Any]]:
    ranges = tested_ranges()
    rows = []
    for name in PACKAGES:
        version, tested = _version(name), ranges.get(name)
        inside = None if version is None or tested is None else is_inside(version, tested)
        if version is None:
            findings.append(f"{name} is not installed; install it with the package, pip install mok-cute.")
        elif inside is False:
            findings.append(f"{name} {version} is outside of the tested range {tested}; install one inside of it.")
        rows.append({"package": name, "version": version, "tested": tested, "inside": inside})
    return rows


def is_inside(version: str, tested: str) -> bool:
    """Whether a version lies in a range of the forms that our pins use: >=, <, joined by commas. A local part
    does not count: 2.13.0+cpu is 2.13.0."""

    def numbers(text: str) -> tuple[int, ...]:
        release = [int(part) for part in re.findall(r"\d+", text.split("+")[0])]
        while release and release[-1] == 0:
            release.pop()
        return tuple(release)

    for rule in tested.split(","):
        bound = numbers(rule)
        if rule.strip().startswith(">=") and numbers(version) < bound:
            return False
        if rule.strip().startswith("<") and numbers(version) >= bound:
            return False
    return True


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _dsl_flavours(findings: list[str]) -> list[dict[str, Any]]:
    rows = [{"flavour": name, "version": _version(name)} for name in FLAVOURS]
    versions = {row["version"] for row in rows if row["version"]}
    if not versions:
        findings.append("no flavour of the DSL's tool chain is installed; install nvidia-cutlass-dsl[cu13].")
    if len(versions) > 1:
        findings.append(f"the DSL's flavours differ in version ({', '.join(sorted(versions))}); install equal ones.")
    return rows


def _compiler(findings: list[str]) -> dict[str, Any]:
    """Whether the DSL can be imported at all, and the CUDA version of the tool chain that it chose."""
    try:
        import cutlass

        version = cutlass.CUDA_VERSION
        return {"importable": True, "cuda": f"{version.major}.{version.minor}"}
    except Exception as error:  # also what its native libraries raise
        findings.append(f"the DSL cannot be imported ({type(error).__name__}: {error}); reinstall nvidia-cutlass-dsl.")
        return {"importable": False, "cuda": None}


def _gpu(findings: list[str]) -> list[dict[str, Any]]:
    """One row per visible device; empty without any."""
    try:
        import torch
    except ImportError:
        return []  # _packages has told that torch is missing
    from mok_cute.arch import Arch

    if not torch.cuda.is_available():
        findings.append(
            f"no CUDA device is visible to torch {torch.__version__}: check, and demo's run, need one; "
            "compile and explain work without."
        )
        return []
    rows = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        try:
            arch = Arch.of_device(index).name
        except MokError as error:
            arch = "none"
            findings.append(str(error))
        if arch not in ("sm_90a", "none"):
            findings.append(f"GPU {index} is {arch}; the forward kernel is built for sm_90a.")
        rows.append(
            {
                "index": index,
                "name": properties.name,
                "arch": arch,
                "sms": properties.multi_processor_count,
                "memory_gib": round(properties.total_memory / 2**30, 1),
                "torch_cuda": torch.version.cuda,
                "driver_cuda": _driver_cuda(findings),
            }
        )
    return rows


def _driver_cuda(findings: list[str]) -> str | None:
    """The newest CUDA that the driver accepts."""
    from cuda.bindings import driver

    error, number = driver.cuDriverGetVersion()
    if int(error) != 0:
        findings.append(f"the CUDA driver does not tell its version (error {int(error)}); look at nvidia-smi.")
        return None
    version = (number // 1000, number % 1000 // 10)
    installed = [name for name in FLAVOURS if _version(name)]
    text = f"{version[0]}.{version[1]}"
    if installed and not any(version >= MIN_DRIVER[name] for name in installed):
        finding = f"the driver accepts CUDA up to {text}, less than {', '.join(installed)} needs; update the driver."
        if finding not in findings:
            findings.append(finding)
    return text


def _cache(findings: list[str]) -> dict[str, Any]:
    """The folder that would be used, looked at without making it."""
    import platformdirs

    from mok_cute.settings import Settings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            settings = Settings.from_environment()
        except ConfigError:
            return {"directory": None, "writable": None, "entries": None}  # _settings tells which variable is wrong
    folder = (settings.cache_dir or Path(platformdirs.user_cache_dir("mok_cute"))).absolute()
    writable = _writable(folder)
    if not writable:
        findings.append(f"the cache folder {folder} cannot be written; set MOK_CUTE_CACHE_DIR to one that can.")
    if not settings.cache:
        findings.append("MOK_CUTE_CACHE=0: every process compiles for itself; unset it to keep compiled kernels.")
    entries = sum(1 for path in folder.glob("*/entry.json")) if folder.is_dir() else 0
    return {"directory": str(folder), "writable": writable, "entries": entries}


def _writable(folder: Path) -> bool:
    """Whether files can be made there, or, while it does not exist, in the nearest folder that does."""
    while not folder.exists():
        folder = folder.parent
    try:
        with tempfile.TemporaryFile(dir=folder):
            return True
    except OSError:
        return False


def _settings(findings: list[str]) -> dict[str, Any]:
    from dataclasses import asdict

    from mok_cute.settings import Settings

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            settings = Settings.from_environment()
        except ConfigError as error:
            findings.append(str(error))
            return {}
    findings += [str(warning.message) for warning in caught]
    return {name: str(value) if isinstance(value, Path) else value for name, value in asdict(settings).items()}
