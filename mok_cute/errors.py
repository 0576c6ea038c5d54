"""Everything this package raises on purpose. A user's mistake is also a ValueError; ours is an assertion."""

from __future__ import annotations

from dataclasses import dataclass


class MokError(Exception):
    """Base of all errors of this package."""


class ConfigError(MokError, ValueError):
    """An argument cannot mean anything: the message names it, its value, the rule and the change."""


class UnsupportedError(MokError):
    """A legal request that this build or machine cannot serve: the message names argument, value and rule."""


class CompileError(MokError):
    """A kernel could not be built; the compiler's own words are in the message."""


class KernelError(MokError):
    """A kernel broke a rule of the machine or stopped for good. Only the virtual GPU finds this; it says where."""


@dataclass(frozen=True)
class TimeoutReport:
    """What a wait on the device saw when it gave up. ``age_s`` is how long it had waited, in seconds."""

    rank: int
    cta: int
    role: str
    signal: str
    index: int
    seen: int
    expected: int
    age_s: float
    missing_rank: int | None = None  # the peer that did not come, for signals that name one

    def __str__(self) -> str:
        missing = "" if self.missing_rank is None else f"; rank {self.missing_rank} is missing"
        return (
            f"rank {self.rank}, CTA {self.cta}, {self.role}: {self.signal}[{self.index}] was {self.seen}, expected "
            f"{self.expected}, after {self.age_s:.3f} s{missing}"
        )


class PeerTimeoutError(MokError):
    """A wait inside a launch passed its limit. The process and its CUDA context stay usable."""

    def __init__(self, report: TimeoutReport) -> None:
        super().__init__(f"{report}. Reset the workspace (workspace.reset()) on all ranks before the next launch.")
        self.report = report
