"""Races, missing fences and reads of memory that nobody wrote, found by what must come before what.

Every access is compared with the last write of the same bytes, and a write also with the reads since: one must come
before the other by a chain of synchronisation, whatever the order was this time. The chain is kept in vector clocks.

What orders, and what more the detector asks for:
- A warp is one actor: a fence or an acquire of one lane counts for all. A missing __syncwarp is not found.
- mbarrier arrivals, and copies and commits that complete on it, come before a wait that saw the phase end or a later
  one. A copy's data come after the phase that it counted to and no other.
- Release and acquire of words in memory, with scopes: seen from another CTA of the grid a scope must be at least
  cluster, seen from another grid (another GPU) it must be sys. Also a fence before a relaxed write, or after a relaxed
  read. Additions continue the release of those before; a plain store ends it.
- bar.sync, barrier.cluster, bulk groups, wgmma groups, tcgen05.commit, tcgen05.wait.
- What the generic proxy wrote, the async proxy may read or overwrite behind a fence.proxy.async that lies on the chain.
  Bulk stores to global memory count for others only when their thread fences between its wait and its release; the
  async proxy of another CTA needs a fence behind the acquire as well.
- Tensor memory that another warp used before a bar.sync or the like needs tcgen05.fence::before_thread_sync ahead of it
  and ::after_thread_sync behind it. Across an mbarrier PTX asks for the same, but the vendor's own pipelines have no
  fence there: an arrival and a wait count as the fences, too.
- Bytes of a word that several warps write in parts are told apart only as far as the last write goes.
"""

from __future__ import annotations

from mok_cute.emulator.race_findings import Finding, RaceError
from mok_cute.emulator.race_tensor import TensorOrder
from mok_cute.emulator.tracker import NO_TRACKER, Tracker

__all__ = ["NO_TRACKER", "Finding", "RaceError", "RaceTracker", "Tracker"]


class RaceTracker(TensorOrder):
    """The whole detector."""
