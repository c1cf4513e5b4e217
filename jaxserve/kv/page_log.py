"""Records which pages enter and leave the prefix cache, for the router of a server with several engines."""

from __future__ import annotations

from array import array

from jaxserve.kv.radix_cache import Node
from jaxserve.types.page_keys import PageEvents, next_key, root_key


class PageLog:
    """The changes since the last `take`. A page that came and left meanwhile is not reported."""

    def __init__(self) -> None:
        self._changes: dict[bytes, bool] = {}  # key -> whether the page was added

    def added(self, node: Node) -> None:
        """Note that the page of `node` is cached now. Its parent is cached or a root."""
        above = node.parent
        assert above is not None and not isinstance(node.key, str)
        if above.page_key is None:
            above.page_key = root_key(str(above.key))
        node.page_key = next_key(above.page_key, array("i", node.key).tobytes())
        self._note(node.page_key, added=True)

    def removed(self, node: Node) -> None:
        """Note that the page of `node` is not cached any more."""
        assert node.page_key is not None
        self._note(node.page_key, added=False)

    def _note(self, key: bytes, *, added: bool) -> None:
        if self._changes.pop(key, added) is added:
            self._changes[key] = added

    def take(self) -> PageEvents | None:
        """Return the changes since the last call; None if there are none."""
        if not self._changes:
            return None
        changes, self._changes = self._changes, {}
        keys: dict[bool, list[bytes]] = {True: [], False: []}
        for key, added in changes.items():
            keys[added].append(key)
        return PageEvents(b"".join(keys[True]), b"".join(keys[False]))
