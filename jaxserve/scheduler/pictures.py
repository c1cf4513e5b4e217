"""The pool of rows that pictures are encoded to: which picture has which rows, and which are encoded in a step. No jax.

The tower writes the rows of a picture to the pool of the device, one for each token; a prompt chunk reads them there.
PicturePool is the only owner of the pool: the device looks nothing up. A picture is held while a running prompt has
not passed it, and stays afterwards until its rows are needed, so that the same picture is encoded once.

    reach            a prompt can be computed up to the first picture without rows. That and the other pictures of the
                     chunk are then wanted
    plan             the next pieces of the tower, for the most urgent pictures: as many as one program holds
    release_passed   the chunk that reads the end of a picture is dispatched: later steps may overwrite its rows
"""

from __future__ import annotations

import itertools
import math
from collections import OrderedDict
from dataclasses import dataclass, field

import numpy as np

from jaxserve.types.picture import Picture, position_delta, position_shifts
from jaxserve.types.scheduling import TowerLimits
from jaxserve.types.step import EncodePart, Request, RowPictures

_Key = tuple[str, bytes]  # namespace and digest: latency would tell who else has sent a picture


@dataclass(eq=False)
class _Entry:
    """A picture with rows in the pool. done: whether all pieces of the tower were dispatched

    While it is not done it has users: without any it is dropped.
    """

    key: _Key
    picture: Picture
    rows: list[int]
    done: bool = False
    users: set[Request] = field(default_factory=set)


class PicturePool:
    """The rows of pictures on the device.

    num_encoded: pictures that were encoded so far. num_reused: pictures that were there already when wanted first
    """

    def __init__(self, limits: TowerLimits) -> None:
        self.num_encoded = self.num_reused = 0
        self._limits = limits
        self._free = list(range(limits.num_rows - 1, -1, -1))
        self._entries: OrderedDict[_Key, _Entry] = OrderedDict()  # least recently used first
        self._wanted: list[_Entry] = []  # to encode, those of equal urgency in this order
        self._begun: list[_Entry] = []  # in one program; some may be dropped
        self._num_pieces = 0  # of these, that were dispatched
        self._held: dict[Request, set[_Entry]] = {}

    @property
    def has_work(self) -> bool:
        """Return whether `plan` would return a part."""
        return bool(self._wanted) or any(entry.users for entry in self._begun)

    def reach(self, request: Request, end: int) -> int:
        """Return the position, at most `end`, up to which a running prompt can be computed now.

        A prompt takes rows in the order of its pictures. So the first picture that it waits for has rows, or other
        requests hold the rows, and they do not wait for this prompt.
        """
        reached = end
        for picture in request.pictures:
            if picture.start >= end:
                break
            if picture.end <= request.num_computed_tokens:
                continue
            entry = self._hold(request, picture)
            if entry is None or not entry.done:
                reached = min(reached, max(picture.start, request.num_computed_tokens))
            if entry is None:
                break
        return reached

    def _hold(self, request: Request, picture: Picture) -> _Entry | None:
        """Hold a picture's rows for a request. A new picture is then wanted. None: too many rows are held."""
        key = request.namespace, picture.digest
        entry = self._entries.get(key)
        if entry is None:
            rows = self._allocate(picture.num_tokens)
            if rows is None:
                return None
            entry = self._entries[key] = _Entry(key, picture, rows)
            self._wanted.append(entry)
        elif request not in entry.users and entry.done:
            self.num_reused += 1
        entry.users.add(request)
        self._held.setdefault(request, set()).add(entry)
        self._entries.move_to_end(key)
        return entry

    def _allocate(self, count: int) -> list[int] | None:
        """Take free rows, and if they are too few those of pictures that nobody holds. None: too many are held."""
        unused = [entry for entry in self._entries.values() if not entry.users]
        if len(self._free) + sum(len(entry.rows) for entry in unused) < count:
            return None
        for entry in unused:
            if len(self._free) >= count:
                break
            self._drop(entry)
        rows = self._free[len(self._free) - count :]
        del self._free[len(self._free) - count :]
        return rows

    def _drop(self, entry: _Entry) -> None:
        self._free += entry.rows
        entry.rows = [self._limits.num_rows] * len(entry.rows)  # its program may go on, for others
        del self._entries[entry.key]
        if entry in self._wanted:
            self._wanted.remove(entry)

    def plan(self) -> list[EncodePart]:
        """Return the parts to run after the rows of this step. Later steps may read the pictures that they complete."""
        parts: list[EncodePart] = []
        left = self._limits.step_seconds
        while self.has_work:
            if not any(entry.users for entry in self._begun):
                self._begin()
            begun = self._begun
            size = self._limits.size_of(sum(entry.picture.num_patches for entry in begun))
            pieces = self._limits.pieces[size]
            first = last = self._num_pieces
            while last < len(pieces):
                seconds = self._limits.seconds.get((pieces[last], size), math.inf)
                if seconds > left and (parts or last > first):
                    break
                left -= seconds
                last += 1
            if last == first:
                break
            rows = [row for entry in begun for row in entry.rows]
            names = sorted({user.request_id for entry in begun for user in entry.users})
            parts.append(EncodePart(tuple(entry.picture for entry in begun), first, last, rows, tuple(names)))
            self._num_pieces = last
            if last == len(pieces):
                self.num_encoded += sum(bool(entry.users) for entry in begun)
                for entry in begun:
                    entry.done = True
                self._begun = []
        return parts

    def _begin(self) -> None:
        """Take the next pictures: the most urgent one that is wanted, and those after it that its program holds too."""
        self._wanted.sort(key=lambda entry: min((not user.aged, user.priority) for user in entry.users))
        room = self._limits.size_of(self._wanted[0].picture.num_patches)
        self._begun, self._num_pieces = [], 0
        while self._wanted and self._wanted[0].picture.num_patches <= room:
            room -= self._wanted[0].picture.num_patches if self._limits.packs else room
            self._begun.append(self._wanted.pop(0))

    def chunk_rows(self, request: Request, start: int, end: int) -> RowPictures | None:
        """Return the rows of the pool for tokens [start, end) of a request; None if it has no pictures."""
        if not request.pictures:
            return None
        rows = np.full(end - start, -1, np.int32)
        for picture in request.pictures:
            first, last = max(start, picture.start), min(end, picture.end)
            if first < last:
                found = self._entries[request.namespace, picture.digest].rows
                rows[first - start : last - start] = found[first - picture.start : last - picture.start]
        return RowPictures(rows, position_shifts(request.pictures, self._limits.merge, start, end))

    def position_delta(self, request: Request) -> int:
        """Return SlotInit.position_delta of a request."""
        return position_delta(request.pictures, self._limits.merge)

    def release_passed(self, request: Request) -> None:
        """Give up the pictures that the dispatched chunks of a request have read to their ends.

        Also one that comes again behind a picture without rows, which may need just these rows.
        """
        if request not in self._held:
            return
        held = {entry.picture.digest for entry in self._held[request]}
        left = (picture.digest for picture in request.pictures if picture.end > request.num_computed_tokens)
        ahead = set(itertools.takewhile(held.__contains__, left))
        for entry in [entry for entry in self._held[request] if entry.picture.digest not in ahead]:
            self._give_up(request, entry)

    def release(self, request: Request) -> None:
        """Give up all pictures of a request that leaves the device."""
        for entry in list(self._held.get(request, ())):
            self._give_up(request, entry)

    def _give_up(self, request: Request, entry: _Entry) -> None:
        entry.users.remove(request)
        self._held[request].remove(entry)
        if not self._held[request]:
            del self._held[request]
        if not (entry.users or entry.done):
            self._drop(entry)

    def flush(self) -> None:
        """Let no later step read the rows: the weights have changed, or the device has lost the rows.

        `reach` makes new entries for the running prompts that still need their pictures.
        """
        for request in list(self._held):
            self.release(request)
        for entry in list(self._entries.values()):
            self._drop(entry)
        self._begun = []

    def check_integrity(self, running: set[Request]) -> None:
        """Raise AssertionError unless every row is exactly once free or a picture's, which running requests hold."""
        entries = self._entries.values()
        rows = [row for entry in entries for row in entry.rows]
        assert sorted(self._free + rows) == list(range(self._limits.num_rows)), "a row is lost or has two owners"
        assert self._held.keys() <= running, "a request that does not run holds pictures"
        held = {(request, entry) for request, found in self._held.items() for entry in found}
        assert held == {(request, entry) for entry in entries for request in entry.users}
        assert all(entry.users and entry in entries for entry in self._wanted), "a picture is encoded for nobody"
        assert all((entry in entries) == bool(entry.users) for entry in self._begun), "a picture is encoded for nobody"
