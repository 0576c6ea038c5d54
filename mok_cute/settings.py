"""Environment variables, all in one place: the only module that reads ``os.environ``.

| variable                 | default                 | meaning                                                         |
|--------------------------|-------------------------|-----------------------------------------------------------------|
| MOK_CUTE_CACHE_DIR       | the user's cache folder | where compiled kernels are kept                                 |
| MOK_CUTE_CACHE           | 1                       | 0: nothing is kept on disk, every process compiles for itself   |
| MOK_CUTE_TIMEOUT_S       | 60                      | limit of a wait inside a launch, seconds; 0: off                |
| MOK_CUTE_ENTRY_TIMEOUT_S | 600                     | limit of the wait for the other ranks at entry, seconds; 0: off |
| MOK_CUTE_CHECKS          | 1                       | 0: none, 1: arguments on the host, 2: also values on the device |
| MOK_CUTE_ENGINE          | auto                    | of the virtual GPU: fast, reference, auto: the fast if built    |
| MOK_CUTE_LOG             | warning                 | debug, info, warning, error                                     |
| MOK_CUTE_TRACE           | none                    | file that receives the in-kernel trace                          |
"""

from __future__ import annotations

import difflib
import math
import os
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from mok_cute.errors import ConfigError

PREFIX = "MOK_CUTE_"
ENGINES = ("auto", "fast", "reference")
LOG_LEVELS = ("debug", "info", "warning", "error")
MAX_TIMEOUT_S = 1e6  # the device counts nanoseconds in 64 bits; eleven days are beyond any wait that helps

# Variables of the DSL that change the code it makes. They are read by the DSL; here they only enter the cache key.
COMPILER_VARIABLES = (
    "CUTE_DSL_COMPILER_OPT",
    "CUTE_DSL_DEBUG",
    "CUTE_DSL_ENABLE_ASSERTIONS",
    "CUTE_DSL_LINEINFO",
    "CUTE_DSL_USE_EXTENSION_COMPILER",
)


@dataclass(frozen=True)
class Settings:
    """What the environment asks for. An argument of a function, where there is one, wins over a field here.

    ``cache_dir`` None means the cache folder that the system gives the user. ``compiler_environment`` lists the DSL's
    own variables that are set, as (name, value).
    """

    cache_dir: Path | None = None
    cache: bool = True
    timeout_s: float = 60.0
    entry_timeout_s: float = 600.0
    checks: int = 1
    log: str = "warning"
    trace: Path | None = None
    compiler_environment: tuple[tuple[str, str], ...] = ()
    engine: str = "auto"

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] | None = None) -> Settings:
        """Settings from the process's environment, or from the given one. Unknown MOK_CUTE_* names give a warning."""
        env = os.environ if environment is None else environment
        _warn_of_unknown(env)
        return cls(
            cache_dir=_path(env, "MOK_CUTE_CACHE_DIR"),
            cache=_choice(env, "MOK_CUTE_CACHE", ("0", "1"), "1") == "1",
            timeout_s=_seconds(env, "MOK_CUTE_TIMEOUT_S", cls.timeout_s),
            entry_timeout_s=_seconds(env, "MOK_CUTE_ENTRY_TIMEOUT_S", cls.entry_timeout_s),
            checks=int(_choice(env, "MOK_CUTE_CHECKS", ("0", "1", "2"), "1")),
            log=_choice(env, "MOK_CUTE_LOG", LOG_LEVELS, cls.log),
            trace=_path(env, "MOK_CUTE_TRACE"),
            compiler_environment=tuple((name, env[name]) for name in COMPILER_VARIABLES if name in env),
            engine=_choice(env, "MOK_CUTE_ENGINE", ENGINES, cls.engine),
        )


KNOWN = (
    "MOK_CUTE_CACHE",
    "MOK_CUTE_CACHE_DIR",
    "MOK_CUTE_CHECKS",
    "MOK_CUTE_ENGINE",
    "MOK_CUTE_ENTRY_TIMEOUT_S",
    "MOK_CUTE_LOG",
    "MOK_CUTE_TIMEOUT_S",
    "MOK_CUTE_TRACE",
)


def _warn_of_unknown(env: Mapping[str, str]) -> None:
    for name in sorted(env):
        if name.startswith(PREFIX) and name not in KNOWN:
            near = difflib.get_close_matches(name, KNOWN, n=1)
            hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(KNOWN)}."
            warnings.warn(f"{name} is not a variable of mok_cute and has no effect; {hint}", stacklevel=3)


def _path(env: Mapping[str, str], name: str) -> Path | None:
    """An empty value means the default, as an empty path would mean the current folder by accident."""
    text = env.get(name, "")
    return Path(text).expanduser() if text else None


def _choice(env: Mapping[str, str], name: str, allowed: tuple[str, ...], default: str) -> str:
    text = env.get(name, default).strip().lower()
    if text not in allowed:
        raise ConfigError(f"{name}={env[name]!r}: not one of {', '.join(allowed)}; set it to one of them or unset it.")
    return text


def _seconds(env: Mapping[str, str], name: str, default: float) -> float:
    text = env.get(name)
    if text is None:
        return default
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value <= MAX_TIMEOUT_S:
        raise ConfigError(f"{name}={text!r}: not a number of seconds from 0 (off) to {MAX_TIMEOUT_S:.0f}; change it.")
    return value
