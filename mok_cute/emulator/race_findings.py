"""What the race detector has found, in words."""

from __future__ import annotations

from dataclasses import dataclass

from mok_cute.errors import KernelError

MOST_SHOWN = 10


@dataclass(frozen=True)
class Finding:
    """Something that is wrong with a kernel, whether or not its results were right.

    kind     race, scope, proxy, tensor fence, uninitialised, mbarrier or exit
    where    the bytes: a buffer's name with the element, or the place in shared or tensor memory
    first    the earlier access and who did it, empty where there is none
    second   the access at which it was found; empty if it was found at the end
    missing  what would have made it right
    """

    kind: str
    where: str
    first: str
    second: str
    missing: str

    def __str__(self) -> str:
        lines = [f"{self.kind} at {self.where}: {self.missing}", f"first   {self.first}", f"second  {self.second}"]
        return "\n    ".join(line for line in lines if not line.endswith("  "))


class RaceError(KernelError):
    """A kernel broke the rules of memory order. ``findings`` has one entry for each pair of places in the program."""

    def __init__(self, findings: list[Finding]) -> None:
        shown = [f"  {number}. {finding}" for number, finding in enumerate(findings[:MOST_SHOWN], 1)]
        rest = [f"  and {len(findings) - MOST_SHOWN} more"] if len(findings) > MOST_SHOWN else []
        super().__init__("\n".join([f"{len(findings)} findings of memory order:", *shown, *rest]))
        self.findings = findings
