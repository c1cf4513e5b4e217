"""Which adapters are on the devices, and which requests use them. An adapter is known by its digest.

A request whose adapter has no slot takes one that no running request uses, the one used longest ago first. If there is
none, it waits, and claims the slot of the adapter that was started longest ago: requests of worse priority, and those
that came after it, do not start with that adapter, so that no adapter waits for ever. A claim lasts while its request
is tried in each step, or until one of better priority claims.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Collection
from typing import NamedTuple

from jaxserve.types.step import Request, RequestStatus

_WAITS = (RequestStatus.WAITING, RequestStatus.PREEMPTED)


def _rank(request: Request) -> tuple[bool, int, float]:
    """Return the sort key of requests that wait for a slot: aged, better priority, arrival."""
    return not request.aged, request.priority, request.arrival


class _Claim(NamedTuple):
    """A waiting request, and the adapter whose slot it gets."""

    request: Request
    digest: str

    def is_void(self, pinned: Collection[str]) -> bool:
        """Return whether the request no longer waits, or the adapter has been pinned since."""
        return self.request.status not in _WAITS or self.digest in pinned


class AdapterSlots:
    """The slots of adapters on the devices.

    num_slots: 0 if there is no room for any
    pinned: adapters that keep their slot; the owner of this object changes them, and leaves at least one slot to others
    num_loads: adapters that were written to a slot so far. num_waits: requests that had to wait for a slot so far
    """

    def __init__(self, num_slots: int) -> None:
        self.pinned: Collection[str] = ()
        self.num_loads = self.num_waits = 0
        self._free = list(reversed(range(num_slots)))
        self._slots: OrderedDict[str, int] = OrderedDict()  # by digest; started longest ago first
        self._running: Counter[str] = Counter()
        self._live: Counter[str] = Counter()
        self._writes: dict[int, str] = {}
        self._claim: _Claim | None = None
        self._is_tried = False  # whether the claiming request was tried since `begin_step`

    def add(self, request: Request) -> None:
        """Count a request that has arrived."""
        if request.adapter:
            self._live[request.adapter] += 1

    def remove(self, request: Request) -> None:
        """Count a request that has ended."""
        if request.adapter:
            self._live[request.adapter] -= 1
            if not self._live[request.adapter]:
                del self._live[request.adapter]

    def counts(self, digest: str) -> tuple[int, int]:
        """Return how many requests with an adapter run, and how many wait."""
        running = self._running[digest]
        return running, self._live[digest] - running

    def is_used(self, digest: str) -> bool:
        """Return whether a request that has not ended has this adapter."""
        return self._live[digest] > 0

    def begin_step(self) -> None:
        """Begin to try waiting requests for a step."""
        if not self._is_tried:
            self._claim = None
        self._is_tried = False

    def try_admit(self, request: Request) -> bool:
        """Return whether a waiting request could have a slot for its adapter now. If not, it may claim one."""
        admitted = not request.adapter or self._has_slot(request)
        if not admitted and not request.waited_for_adapter:
            request.waited_for_adapter = True
            self.num_waits += 1
        return admitted

    def _has_slot(self, request: Request) -> bool:
        if self._claim is not None and self._claim.is_void(self.pinned):
            self._claim = None
        claim = self._claim
        is_own = claim is not None and claim.request is request
        self._is_tried |= is_own
        passes = claim is None or is_own or _rank(request) < _rank(claim.request)
        if request.adapter in self._slots:
            return passes or claim is None or claim.digest != request.adapter
        if self._free or self._idle() is not None:
            return passes
        oldest = next((each for each in self._slots if each not in self.pinned), None)
        if passes and not is_own and oldest is not None:
            self._claim = _Claim(request, oldest)
            self._is_tried = True
        return False

    def assign(self, request: Request) -> None:
        """Give a slot to a request that starts, for which `try_admit` was true."""
        digest = request.adapter
        if not digest:
            return
        if digest not in self._slots:
            self._slots[digest] = self._free.pop() if self._free else self._evict()
            self._writes[self._slots[digest]] = digest
            self.num_loads += 1
        self._slots.move_to_end(digest)
        self._running[digest] += 1
        request.adapter_slot = self._slots[digest]

    def release(self, request: Request) -> None:
        """Take the slot back from a request that does not run any more."""
        if request.adapter:
            self._running[request.adapter] -= 1
            if not self._running[request.adapter]:
                del self._running[request.adapter]
            request.adapter_slot = -1

    def take_writes(self) -> dict[int, str]:
        """Return the adapters to write to slots before the next step runs, by slot."""
        writes, self._writes = self._writes, {}
        return writes

    def forget(self) -> None:
        """Forget which adapters the devices hold, because their memory is lost. No request may run."""
        self._free += self._slots.values()
        self._slots.clear()
        self._writes.clear()

    def _idle(self) -> str | None:
        """Return the adapter to evict, with which no request runs; None: every adapter is used or pinned."""
        idle = (each for each in self._slots if not self._running[each] and each not in self.pinned)
        return next(idle, None)

    def _evict(self) -> int:
        victim = self._idle()
        assert victim is not None
        return self._slots.pop(victim)

    def check_integrity(self, running: Collection[Request], live: Collection[Request]) -> None:
        """Raise AssertionError unless every slot and every request is accounted for."""
        slots = [*self._slots.values(), *self._free]
        assert len(set(slots)) == len(slots), "a slot is there twice"
        used = Counter(request.adapter for request in running if request.adapter)
        assert used == self._running, "running requests of an adapter"
        assert Counter(request.adapter for request in live if request.adapter) == +self._live, "requests of an adapter"
        for request in running:
            if request.adapter:
                assert self._slots[request.adapter] == request.adapter_slot, "a running request has another slot"
