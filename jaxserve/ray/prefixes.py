"""Which replica has the beginning of a prompt in its cache: remembered from what was sent where, not asked.

A prompt is cut into blocks of text. A block is named by a hash of its text and of all text before it, so that two
prompts share the names of their common beginning and no others. Ray is not imported here, so that this part is tested
where Ray is not installed.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from jaxserve.routing.router import MAX_RATIO, MAX_SPREAD, PrefixHolders

BLOCK_BYTES = 64  # bytes of text, about a page of 16 tokens
MAX_PROMPT = 128 * 1024  # most bytes of a prompt that are compared
MAX_BLOCKS = 128 * 1024  # most blocks that are remembered: 8 MiB of text


class _Prompt(msgspec.Struct):
    """The parts of a body that make the prompt, in the order of templates. Each stays JSON text.

    An adapter is named as the model, or by lora_path, and has pages of its own.
    """

    model: msgspec.Raw = msgspec.Raw()
    lora_path: msgspec.Raw = msgspec.Raw()
    cache_salt: msgspec.Raw = msgspec.Raw()
    extra_key: msgspec.Raw = msgspec.Raw()
    tools: msgspec.Raw = msgspec.Raw()
    system: msgspec.Raw = msgspec.Raw()
    instructions: msgspec.Raw = msgspec.Raw()
    messages: msgspec.Raw = msgspec.Raw()
    prompt: msgspec.Raw = msgspec.Raw()
    input: msgspec.Raw = msgspec.Raw()
    input_ids: msgspec.Raw = msgspec.Raw()
    text: msgspec.Raw = msgspec.Raw()
    query: msgspec.Raw = msgspec.Raw()


_PROMPT = msgspec.json.Decoder(_Prompt)


def prompt_blocks(body: bytes) -> list[int]:
    """Return the hashes of the blocks of a request's prompt; none if the body is not an object or has no prompt.

    The JSON text of a conversation is a prefix of the JSON text of its next turn.
    """
    try:
        found = _PROMPT.decode(body)
    except (msgspec.MsgspecError, RecursionError):
        return []
    text = b"\0".join(bytes(getattr(found, name)) for name in _Prompt.__struct_fields__)
    name = 0
    names = []
    for start in range(0, min(len(text), MAX_PROMPT) - BLOCK_BYTES + 1, BLOCK_BYTES):
        name = hash((name, text[start : start + BLOCK_BYTES]))
        names.append(name)
    return names


@dataclass(frozen=True, slots=True)
class RayReplicaLoad:
    """The load of a replica.

    is_ready: whether its engine accepts requests. num_requests: requests that run or wait there
    """

    is_ready: bool
    num_requests: int


@dataclass(frozen=True, slots=True)
class RoutingRule:
    """The rule that says whether a known prefix or the load decides.

    imbalanced_threshold, imbalanced_ratio: if the most loaded replica exceeds the least loaded one by both, only the
      load decides
    match_rate_threshold: least share of the prompt that a replica must have seen to be preferred
    """

    imbalanced_threshold: float = MAX_SPREAD
    imbalanced_ratio: float = MAX_RATIO
    match_rate_threshold: float = 0.5

    def rank(self, loads: Mapping[str, RayReplicaLoad], matched: Mapping[str, int], num_blocks: int) -> list[str]:
        """Return the replicas, best first. Among equals the order of `loads` stays.

        matched: number of the prompt's leading blocks that each replica has seen
        """
        requests = [load.num_requests for load in loads.values() if load.is_ready]
        least = min(requests, default=0)
        most = max(requests, default=0)
        is_uneven = most - least > self.imbalanced_threshold and most > self.imbalanced_ratio * least
        share = {name: matched.get(name, 0) / num_blocks if num_blocks else 0.0 for name in loads}

        def cost(name: str) -> tuple[bool, bool, float]:
            known = 0.0 if is_uneven else share[name]
            is_home = known >= self.match_rate_threshold and known == max(share.values())
            return not loads[name].is_ready, not is_home, loads[name].num_requests - known

        return sorted(loads, key=cost)


class PrefixMap:
    """The blocks that each replica has seen. The least recently used blocks are forgotten."""

    def __init__(self, max_blocks: int = MAX_BLOCKS) -> None:
        self._max_blocks = max_blocks
        self._seen: PrefixHolders[int] = PrefixHolders()
        self._used: OrderedDict[int, None] = OrderedDict()  # the blocks, the least recently used first
        self._numbers: dict[str, int] = {}  # number of each replica

    def __len__(self) -> int:
        return len(self._used)

    def add(self, blocks: Sequence[int], replica: str) -> None:
        """Remember that `replica` computes these blocks. The first blocks of a prompt are forgotten last."""
        blocks = blocks[: self._max_blocks]
        self._seen.add(self._number(replica), blocks)
        for block in reversed(blocks):
            self._used[block] = None
            self._used.move_to_end(block)
        while len(self._used) > self._max_blocks:
            self._seen.drop(self._used.popitem(last=False)[0])

    def _number(self, replica: str) -> int:
        """Return the number of a replica. A new replica gets the least free number."""
        if replica not in self._numbers:
            taken = set(self._numbers.values())
            self._numbers[replica] = next(number for number in itertools.count() if number not in taken)
        return self._numbers[replica]

    def matched(self, blocks: Sequence[int], replicas: Iterable[str]) -> dict[str, int]:
        """Count the leading blocks that each of the replicas has seen."""
        names = list(replicas)
        known = [self._numbers[name] for name in names if name in self._numbers]
        found = self._seen.match(blocks, known)
        return {name: found.get(self._numbers.get(name, -1), 0) for name in names}

    def forget(self, replica: str) -> None:
        """Forget the blocks of a replica that has ended."""
        if replica in self._numbers:
            self._seen.forget(self._numbers.pop(replica))
            self._used = OrderedDict((block, None) for block in self._used if block in self._seen)
