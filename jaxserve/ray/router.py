"""Ray Serve's request router: the replica that has a prompt's beginning, unless it is too busy.

It runs in the ingress, which has read the body. `request_router_kwargs` are the fields of RoutingRule and max_blocks.
Configurations name this module.
"""

from __future__ import annotations

from typing import Any

from ray.serve.request_router import (  # pyright: ignore[reportMissingImports]
    PendingRequest,
    ReplicaID,
    RequestRouter,
    RunningReplica,
)

from jaxserve.ray.prefixes import MAX_BLOCKS, PrefixMap, RayReplicaLoad, RoutingRule, prompt_blocks
from jaxserve.ray.relay import RelayedRequest


class PrefixRouter(RequestRouter):
    """Rank the replicas of an engine's deployment for each request. Ray calls its methods."""

    def initialize_state(self, *, max_blocks: int = MAX_BLOCKS, **rule: float) -> None:
        """Make the empty map and the rule. Raises TypeError for a keyword that RoutingRule does not have."""
        self._rule = RoutingRule(**rule)
        self._prefixes = PrefixMap(max_blocks)
        self._num_routed: dict[str, int] = {}

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Return the candidates one by one; Ray takes the first whose queue is not full."""
        if pending_request is not None:
            pending_request.routing_context.should_backoff = True  # between two rounds in which all were full
        blocks = _blocks_of(pending_request)
        by_name = {_name(each.replica_id): each for each in candidate_replicas}
        fewest_first = sorted(by_name, key=lambda name: self._num_routed.get(name, 0))
        loads = {name: self._load(by_name[name]) for name in fewest_first}
        matched = self._prefixes.matched(blocks, by_name)
        return [[by_name[name]] for name in self._rule.rank(loads, matched, len(blocks))]

    def _load(self, replica: RunningReplica) -> RayReplicaLoad:
        """Return the replica's load: the requests that this router sent there, or its own count if that is more."""
        own = self.replica_queue_len_cache.get(replica.replica_id) or 0
        said: dict[str, Any] = replica.routing_stats or {}
        return RayReplicaLoad(bool(said.get("is_ready", True)), max(own, int(said.get("num_requests", 0))))

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        name = _name(replica_id)
        self._num_routed[name] = self._num_routed.get(name, 0) + 1
        self._prefixes.add(_blocks_of(pending_request), name)

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        super().on_replica_actor_died(replica_id)
        self._forget(_name(replica_id))

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        gone = {_name(each) for each in self.curr_replicas} - {_name(each.replica_id) for each in replicas}
        super().update_replicas(replicas)
        for name in gone:
            self._forget(name)

    def _forget(self, name: str) -> None:
        self._num_routed.pop(name, None)
        self._prefixes.forget(name)


def _name(replica_id: ReplicaID) -> str:
    return replica_id.unique_id


def _blocks_of(pending: PendingRequest | None) -> list[int]:
    request = pending.args[0] if pending is not None and pending.args else None
    return prompt_blocks(request.body) if isinstance(request, RelayedRequest) else []
