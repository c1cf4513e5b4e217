"""Which replica computes a request: of the replicas that can, the one that the router chooses among those of a role.

with roles (roles.py)                                   computed by
the prompt lacks few pages in the best decode engine    this decode engine
the answer ends with the prompt                         a prefill engine
all others                                              a prefill engine, then a decode engine (prompt_handover.py)
no engine of one role serves                            an engine of the other role
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from jaxserve.client.processes.roles import Role, Roles, ends_with_prompt
from jaxserve.client.replicas.replica import Replica
from jaxserve.routing.router import Router
from jaxserve.types.page_keys import TOKEN_BYTES
from jaxserve.types.sampling import BACKGROUND_PRIORITY, EngineRequest


class ReplicaChoice:
    """Chooses the replica of each request. router: None until the page size is known, and if there is one replica"""

    def __init__(self, replicas: Sequence[Replica], roles: Roles) -> None:
        self._replicas = replicas
        self._roles = roles
        self.router: Router | None = None

    def of_request(self, request: EngineRequest, prompt: bytes, *, at_first: bool = True) -> Replica:
        """Return the replica that a request goes to. prompt: token ids, int32, little-endian

        at_first: it was in no replica yet, so the one that it names is used
        """
        if len(self._replicas) == 1:
            return self._replicas[0]
        if at_first and request.replica is not None:
            return self._replicas[request.replica]
        if not self._roles.num_prefill:
            return self._best(self._replicas, request, prompt)
        prefill, decode = self._usable("prefill"), self._usable("decode")
        if not (prefill and decode):
            return self._best(prefill or decode or self._replicas, request, prompt)
        if ends_with_prompt(request.params):
            return self._best(prefill, request, prompt)
        target = self._best(decode, request, prompt)
        is_short = self._num_missing(target, request, prompt) < self._roles.min_tokens
        return target if is_short else self._best(prefill, request, prompt)

    def of_decode(self, request: EngineRequest) -> Replica:
        """Return the replica that goes on with a request whose prompt is computed."""
        replicas = self._usable("decode") or self._usable("prefill") or self._replicas
        return self._best(replicas, request, prompt_bytes(request))

    def passes_on(self, replica: Replica, request: EngineRequest) -> bool:
        """Return whether a replica only computes the prompt of a request, which then goes on in another."""
        if replica.role != "prefill" or request.replica == replica.index or ends_with_prompt(request.params):
            return False
        return bool(self._usable("decode"))

    def _usable(self, role: Role) -> list[Replica]:
        return [each for each in usable(self._replicas) if each.role == role]

    def _num_missing(self, replica: Replica, request: EngineRequest, prompt: bytes) -> int:
        """Return how many tokens of a prompt a replica would have to compute."""
        num_cached = 0 if self.router is None else self.router.num_cached(replica.index, prompt, request.namespace)
        return len(prompt) // TOKEN_BYTES - num_cached

    def _best(self, replicas: Sequence[Replica], request: EngineRequest, prompt: bytes) -> Replica:
        found = _candidates(replicas)
        if self.router is None:
            return found[0]
        loads = [replica.load for replica in found]
        batch = request.priority >= BACKGROUND_PRIORITY
        return self._replicas[self.router.choose(loads, prompt, request.namespace, batch=batch)]


def prompt_bytes(request: EngineRequest) -> bytes:
    """Return the prompt of a request as the router reads it."""
    return array("i", request.prompt_token_ids).tobytes()


def usable(replicas: Sequence[Replica]) -> list[Replica]:
    """Return those of the replicas that are usable: those that are awake, and if all sleep, all of them."""
    found = [replica for replica in replicas if replica.is_usable]
    return [replica for replica in found if not replica.asleep] or found


def _candidates(replicas: Sequence[Replica]) -> Sequence[Replica]:
    """Return those of the replicas that may get a request, of the best kind that there is."""
    living = [replica for replica in replicas if not replica.is_dead]
    found = usable(living)
    kinds = (
        [replica for replica in found if replica.supervisor.beats],
        found,
        [replica for replica in living if not (replica.is_stale or replica.sender.is_isolating)],
        living,
        replicas,
    )
    return next(kind for kind in kinds if kind)
