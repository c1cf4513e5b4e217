"""Which replica a prompt is sent to: by its beginning, unless the load says otherwise."""

import json
import random
from collections.abc import Mapping

from jaxserve.ray.prefixes import BLOCK_BYTES, MAX_PROMPT, PrefixMap, RayReplicaLoad, RoutingRule, prompt_blocks

NAMES = ("a", "b", "c")


def body(**fields: object) -> bytes:
    return json.dumps({"model": "demo", **fields}).encode()


def loads(*requests: int) -> dict[str, RayReplicaLoad]:
    return {name: RayReplicaLoad(True, count) for name, count in zip(NAMES, requests, strict=False)}


def chat(*texts: str) -> bytes:
    return body(messages=[{"role": "user", "content": text} for text in texts], temperature=0)


def test_a_next_turn_begins_with_the_blocks_of_the_former() -> None:
    first, second = prompt_blocks(chat("x" * 300)), prompt_blocks(chat("x" * 300, "y" * 300))
    assert len(first) == 5 and first == second[:5] and len(second) > 9


def test_another_beginning_shares_no_block() -> None:
    one, other = prompt_blocks(chat("a" + "x" * 500)), prompt_blocks(chat("b" + "x" * 500))
    assert not set(one) & set(other)


def test_what_names_a_prompt() -> None:
    text = "x" * 300
    same = [body(prompt=text), body(max_tokens=3, prompt=text)]
    assert prompt_blocks(same[0]) == prompt_blocks(same[1]) != []
    others = (body(prompt=text, cache_salt="s"), body(prompt=text, tools=[{"a": 1}]), body(input=text))
    for other in (*others, body(prompt=text, model="sql"), body(prompt=text, lora_path="sql")):
        assert not set(prompt_blocks(other)) & set(prompt_blocks(same[0]))
    for none in (b"", b"[]", b"{", b"\xff", body(), b"[" * 100_000):
        assert prompt_blocks(none) == []
    assert len(prompt_blocks(body(prompt="x" * 2 * MAX_PROMPT))) == MAX_PROMPT // BLOCK_BYTES


def test_a_known_prefix_decides() -> None:
    rule = RoutingRule()
    assert rule.rank(loads(3, 0, 1), {"a": 6}, 10) == ["a", "b", "c"]
    assert rule.rank(loads(3, 0, 1), {"a": 4}, 10) == ["b", "c", "a"]  # less than half of the prompt
    assert rule.rank(loads(1, 1, 1), {"c": 4}, 10)[0] == "c"  # among equals it still counts
    assert rule.rank(loads(1, 0, 1), {"a": 8, "c": 9}, 10)[0] == "c"
    assert rule.rank(loads(2, 1, 2), {}, 0)[0] == "b"


def test_an_uneven_load_decides_alone() -> None:
    rule = RoutingRule()
    assert rule.rank(loads(9, 0, 0), {"a": 10}, 10)[0] != "a"
    assert rule.rank(loads(8, 0, 0), {"a": 10}, 10)[0] == "a"  # 8 is not above the threshold
    assert rule.rank(loads(29, 20, 20), {"a": 10}, 10)[0] == "a"  # 9 more, but less than one and a half times as many
    assert RoutingRule(imbalanced_threshold=2).rank(loads(3, 0, 0), {"a": 10}, 10)[0] != "a"


def test_an_engine_that_starts_again_comes_last() -> None:
    busy = loads(0, 5) | {"a": RayReplicaLoad(False, 0)}
    assert RoutingRule().rank(busy, {"a": 10}, 10) == ["b", "a"]


def test_the_map_counts_leading_blocks_and_forgets() -> None:
    seen = PrefixMap()
    seen.add([1, 2, 3, 4], "a")
    seen.add([1, 2], "b")
    assert seen.matched([1, 2, 3, 9], ["a", "b", "c"]) == {"a": 3, "b": 2, "c": 0}
    assert seen.matched([9, 1], ["a"]) == {"a": 0}
    seen.forget("a")
    assert seen.matched([1, 2, 3], ["a", "b"]) == {"a": 0, "b": 2} and len(seen) == 2


def test_a_new_replica_knows_nothing_of_the_one_before() -> None:
    seen = PrefixMap()
    seen.add([1, 2], "a")
    seen.add([1], "b")
    seen.forget("a")
    seen.forget("never seen")
    seen.add([3], "c")
    assert seen.matched([1, 2], ["b", "c"]) == {"b": 1, "c": 0} and len(seen) == 2
    assert seen.matched([3], ["a", "c"]) == {"a": 0, "c": 1}


def test_the_least_recently_used_blocks_go_and_ends_of_prompts_first() -> None:
    seen = PrefixMap(4)
    seen.add([1, 2, 3], "a")
    seen.add([11, 12], "a")
    assert len(seen) == 4 and seen.matched([1, 2, 3], ["a"]) == {"a": 2}
    seen.add(range(100, 200), "b")
    assert len(seen) == 4 and seen.matched([100, 101, 102, 103, 104], ["b"]) == {"b": 4}


def test_chats_stay_and_spread() -> None:
    """40 chats of 4 turns over 3 replicas: later turns find theirs, and no replica has more than half of the chats."""
    rule, seen, draw = RoutingRule(), PrefixMap(), random.Random(7)
    homes: dict[int, str] = {}
    routed: dict[str, int] = dict.fromkeys(NAMES, 0)
    turns = [(chat_id, turn) for turn in range(4) for chat_id in draw.sample(range(40), 40)]
    hits = 0
    for chat_id, turn in turns:
        blocks = prompt_blocks(chat(*(f"{chat_id} {each} " + "z" * 200 for each in range(turn + 1))))
        order: Mapping[str, RayReplicaLoad] = {
            name: RayReplicaLoad(True, draw.randrange(4)) for name in sorted(NAMES, key=lambda name: routed[name])
        }
        best = rule.rank(order, seen.matched(blocks, NAMES), len(blocks))[0]
        seen.add(blocks, best)
        routed[best] += 1
        hits += homes.get(chat_id) == best
        homes[chat_id] = best
    assert hits >= 0.9 * 40 * 2 and max(list(homes.values()).count(name) for name in NAMES) <= 20
