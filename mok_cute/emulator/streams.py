"""Launches in stream order: a queue per stream, and waits of one stream for another.

``take_ready`` gives the launches that may run now, at most one per stream: they run at the same time, as kernels that
wait for each other need it. The next of each stream start when all of these have ended; a GPU may start them earlier,
so a kernel that waits for the second launch of another stream is a deadlock here and not there.
"""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import dataclass

from mok_cute.emulator.driver import Launch


@dataclass(frozen=True)
class Wait:
    """Nothing behind this in its queue starts before ``stream`` has ended ``count`` launches."""

    stream: int
    count: int


class Streams:
    """All streams of a device. Handle 0 is the default stream and is like any other."""

    def __init__(self) -> None:
        self._queues: defaultdict[int, deque[Launch | Wait]] = defaultdict(deque)
        self._submitted: defaultdict[int, int] = defaultdict(int)
        self._ended: defaultdict[int, int] = defaultdict(int)
        self._next_handle = 1

    def create(self) -> int:
        """The handle of a new stream."""
        self._next_handle += 1
        return self._next_handle

    @property
    def num_pending(self) -> int:
        return sum(self._submitted.values()) - sum(self._ended.values())

    def enqueue(self, launch: Launch) -> None:
        self._queues[launch.stream].append(launch)
        self._submitted[launch.stream] += 1

    def wait(self, stream: int, other: int) -> None:
        """What ``stream`` gets from now on starts after all that ``other`` has now."""
        if stream != other and self._ended[other] < self._submitted[other]:
            self._queues[stream].append(Wait(other, self._submitted[other]))

    def take_ready(self) -> list[Launch]:
        """Remove and give the launches that may run now; ``end`` must be called when they have run."""
        ready = []
        for queue in self._queues.values():
            while queue:
                first = queue[0]
                if isinstance(first, Launch):
                    ready.append(first)
                    queue.popleft()
                    break
                if self._ended[first.stream] < first.count:
                    break
                queue.popleft()
        return ready

    def end(self, launches: list[Launch]) -> None:
        for launch in launches:
            self._ended[launch.stream] += 1

    def clear(self) -> None:
        """Forget all that has not run."""
        for stream, queue in self._queues.items():
            queue.clear()
            self._ended[stream] = self._submitted[stream]
