"""Fair sharing between tenants: one that floods the server delays another one by two steps at most."""

import random
from collections.abc import Sequence

import pytest

from jaxserve.engine.core import EngineCore
from jaxserve.scheduler.tenants import TenantShares
from jaxserve.types.sampling import BACKGROUND_PRIORITY, EngineRequest, SamplingParams, Tenant
from jaxserve.types.step import Request, ScheduledRow
from tests.fakes import VOCAB, Transcripts, alone, make_core, make_request, small_config

POLICIES = ("fcfs", "lpm", "priority")
FLOOD, LIGHT = Tenant("flood"), Tenant("light")
SLOTS = 8
SIZES: dict[str, object] = {
    "num_pages": 512,
    "max_num_batched_tokens": 64,
    "max_model_len": 512,
    "max_num_seqs": SLOTS,
    "aging_steps": 64,
}
RNG = random.Random(0)


def prompt(length: int) -> list[int]:
    return RNG.choices(range(VOCAB), k=length)


def core_of(**changes: object) -> EngineCore:
    return make_core(small_config(**(SIZES | changes)))


def step(core: EngineCore, transcripts: Transcripts, times: int = 1) -> None:
    for _ in range(times):
        transcripts.take(core.step())
        core.scheduler.check_integrity()


def steps_to_first_token(core: EngineCore, request: EngineRequest, transcripts: Transcripts) -> int:
    core.add(request)
    for count in range(1, 500):
        step(core, transcripts)
        if request.request_id in transcripts and transcripts[request.request_id].token_ids:
            return count
    raise AssertionError("it never started")


@pytest.mark.parametrize(
    ("flood_prompt", "flood_tokens", "length", "policy"),
    [
        (6, 200, 5, "fcfs"),
        (200, 4, 5, "priority"),
        (300, 150, 5, "lpm"),
        (6, 200, 40, "lpm"),
        (200, 4, 40, "fcfs"),
        (300, 150, 40, "priority"),
    ],
)
def test_a_flood_delays_another_tenant_by_two_steps(
    policy: str, flood_prompt: int, flood_tokens: int, length: int
) -> None:
    """Long outputs hold every slot, long prompts the token budget, both together the pages."""
    mine = [make_request(f"light{i}", prompt(length), max_tokens=6, tenant=LIGHT) for i in range(10)]
    idle = core_of(policy=policy)
    lone = max(steps_to_first_token(idle, request, Transcripts()) for request in mine[:1])
    core, transcripts = core_of(policy=policy), Transcripts()
    for i in range(100):
        core.add(make_request(f"flood{i}", prompt(flood_prompt), max_tokens=flood_tokens, tenant=FLOOD))
    step(core, transcripts, 20)
    delays = []
    for request in mine:
        delays.append(steps_to_first_token(core, request, transcripts) - lone)
        pause = RNG.randrange(length, 2 * length)  # so that it takes less than half of what the flood takes
        step(core, transcripts, pause)
    assert max(delays) <= 2, delays
    for request in mine:
        found = transcripts[request.request_id]
        if found.last is not None:
            assert found.token_ids == alone(request.prompt_token_ids, request.params)[0]
    assert any(name.startswith("flood") for name in transcripts)


def test_a_short_prompt_shares_its_step_with_no_long_chunk_of_another_tenant() -> None:
    """Its step has as many tokens of the flood as of its own, and the step after that is full again."""
    core = core_of()
    for i in range(4):
        core.add(make_request(f"flood{i}", prompt(400), max_tokens=4, tenant=FLOOD))
    chunks: list[int] = []
    for count in range(20):
        if count in (4, 10, 11, 12):
            core.add(make_request(f"light{count}", prompt(5), max_tokens=2, tenant=LIGHT))
        core.step()
        newest = core.scheduler.in_flight.newest
        chunks.append(sum(row.num_tokens for row in newest.rows[newest.num_decode_rows :]))
        core.scheduler.check_integrity()
    full = SIZES["max_num_batched_tokens"]
    assert chunks[3] == full and chunks[4] == 10 and chunks[5] > 50
    assert chunks[10] == 10 and chunks[11] > 50 and chunks[12] == 10, "the flood goes on beside many short prompts"


def test_the_last_slot_is_kept_for_another_tenant() -> None:
    """No request is preempted for it, and the flood has all slots but one."""
    core, transcripts = core_of(), Transcripts()
    core.add(make_request("first", prompt(5), max_tokens=1, tenant=LIGHT))
    for i in range(100):
        core.add(make_request(f"flood{i}", prompt(6), max_tokens=40, tenant=FLOOD))
    step(core, transcripts, 20)
    assert core.scheduler.stats().num_running == SLOTS - 1
    for i in range(20):
        request = make_request(f"light{i}", prompt(5), max_tokens=4, tenant=LIGHT)
        assert steps_to_first_token(core, request, transcripts) <= 3
        step(core, transcripts, 8)
    assert core.scheduler.counters.priority_preemptions == 0


def test_without_tenants_the_flood_comes_first() -> None:
    """The test above could not fail if slots were never short."""
    core, transcripts = core_of(), Transcripts()
    for i in range(100):
        core.add(make_request(f"flood{i}", prompt(6), max_tokens=200))
    step(core, transcripts, 20)
    assert steps_to_first_token(core, make_request("light", prompt(5), max_tokens=6), transcripts) > 100


@pytest.mark.parametrize(("policy", "weights"), [("fcfs", (1.0, 1.0)), ("lpm", (1.0, 3.0)), ("priority", (1.0, 3.0))])
def test_two_floods_are_served_by_weight(policy: str, weights: tuple[float, float]) -> None:
    """Shares of all tokens, prompt and output, over 500 steps. The lengths of one tenant's requests are twice as
    long."""
    core, transcripts = core_of(policy=policy), Transcripts()
    tenants = [Tenant(f"t{i}", weight=weight) for i, weight in enumerate(weights)]
    served = [0, 0]
    sizes = [(10, 12), (20, 24)]
    live: list[dict[str, EngineRequest]] = [{}, {}]
    number = 0
    for _ in range(500):
        for i, tenant in enumerate(tenants):
            while len(live[i]) < 2 * SLOTS:
                number += 1
                length, tokens = sizes[i]
                request = make_request(f"{i}.{number}", prompt(length), max_tokens=tokens, tenant=tenant)
                core.add(request)
                live[i][request.request_id] = request
        outputs = core.step()
        transcripts.take(outputs)
        for output in outputs:
            i = int(output.request_id[0])
            if len(transcripts[output.request_id].token_ids) == len(output.token_ids):
                served[i] += sizes[i][0]
            served[i] += len(output.token_ids)
            if output.finish_reason is not None:
                del live[i][output.request_id]
    share = served[1] / sum(served)
    assert share == pytest.approx(weights[1] / sum(weights), abs=0.03), served
    core.scheduler.check_integrity()


def test_a_tenant_that_returns_has_saved_up_nothing() -> None:
    core, transcripts = core_of(), Transcripts()
    for i in range(60):
        core.add(make_request(f"flood{i}", prompt(6), max_tokens=20, tenant=FLOOD))
    core.add(make_request("early", prompt(6), max_tokens=1, tenant=LIGHT))
    step(core, transcripts, 60)
    for i in range(60):
        core.add(make_request(f"light{i}", prompt(6), max_tokens=20, tenant=LIGHT))
    before = len(transcripts)
    step(core, transcripts, 60)
    started = list(transcripts)[before:]
    assert 0.3 < sum(name.startswith("flood") for name in started) / len(started) < 0.7


def test_at_most_so_many_of_a_tenant_run() -> None:
    core, transcripts = core_of(), Transcripts()
    limited = Tenant("limited", max_running=2)
    for i in range(10):
        core.add(make_request(f"r{i}", prompt(6), max_tokens=12, tenant=limited))
    most = 0
    while core.has_work:
        step(core, transcripts)
        most = max(most, core.scheduler.stats().num_running)
    assert most == 2 and len(transcripts) == 10


def test_batch_requests_of_a_tenant_wait_behind_online_ones_of_all() -> None:
    core, transcripts = core_of(policy="priority"), Transcripts()
    for i in range(20):
        core.add(make_request(f"batch{i}", prompt(6), max_tokens=20, tenant=LIGHT, priority=BACKGROUND_PRIORITY))
    step(core, transcripts, 5)
    for i in range(SLOTS):
        core.add(make_request(f"online{i}", prompt(6), max_tokens=20, tenant=FLOOD))
    step(core, transcripts, 30)
    assert sum(name.startswith("online") for name in transcripts) == SLOTS


def test_one_tenant_is_scheduled_as_none() -> None:
    def steps(tenant: Tenant | None) -> list[tuple[str, ...]]:
        core, transcripts, rng = core_of(), Transcripts(), random.Random(4)
        for i in range(40):
            length = rng.randrange(1, 80)
            core.add(make_request(f"r{i}", rng.choices(range(VOCAB), k=length), max_tokens=9, tenant=tenant))
        found = []
        while core.has_work:
            outputs = core.step()
            transcripts.take(outputs)
            found.append(tuple(output.request_id for output in outputs))
        return found

    assert steps(None) == steps(FLOOD)


@pytest.mark.parametrize("policy", POLICIES)
def test_tokens_are_those_of_each_request_alone(policy: str) -> None:
    """Few pages, three tenants with weights and a limit, requests that are aborted."""
    rng = random.Random(policy)
    tenants = [None, Tenant("a", 3.0), Tenant("b", 0.5, max_running=3)]
    core, transcripts = core_of(num_pages=60, policy=policy), Transcripts()
    asked: dict[str, EngineRequest] = {}
    for number in range(300):
        if rng.random() < 0.4:
            params: dict[str, object] = {"max_tokens": rng.randrange(1, 40), "tenant": rng.choice(tenants)}
            request = make_request(f"r{number}", rng.choices(range(VOCAB), k=rng.randrange(1, 90)), **params)
            core.add(request)
            asked[request.request_id] = request
        step(core, transcripts)
        if rng.random() < 0.03 and (live := sorted(core.scheduler.live_ids)):
            name = rng.choice(live)
            transcripts.take(core.abort([name]))
            asked.pop(name)
    while core.has_work:
        step(core, transcripts)
    for name, request in asked.items():
        assert transcripts[name].token_ids == alone(request.prompt_token_ids, request.params)[0], name


def request_of(tenant: Tenant, page_ids: Sequence[int] = (), num_tokens: int = 10) -> Request:
    request = Request(tenant.name, [0] * num_tokens, SamplingParams(), arrival=0.0, seed=0, max_tokens=1)
    request.tenant, request.page_ids = tenant, [*page_ids]
    return request


def shares_of(num_slots: int, *live: Request) -> TenantShares:
    shares = TenantShares(num_slots, num_pages=64, quantum=32)
    for request in live:
        shares.add(request)
    return shares


def charge(shares: TenantShares, request: Request, num_tokens: int) -> None:
    shares.charge([ScheduledRow("", 0, 0, num_tokens, False, [], 0, [])], [request])


def test_a_claim_takes_what_is_beyond_a_share_and_never_the_last_request() -> None:
    waiting = request_of(LIGHT)
    running = [*(request_of(FLOOD, [page]) for page in range(4)), request_of(Tenant("third"), range(4, 40))]
    shares = shares_of(6, waiting, *running)
    claim = shares.claim(waiting, running, page_size=4)
    assert claim is not None
    assert not claim.take(running[4]), "it has more than a third of the pages, and no other request"
    assert [claim.take(each) for each in running[:3]] == [True, True, False], "a third of the slots is its share"
    charge(shares, waiting, 64)
    claim = shares.claim(waiting, running, page_size=4)
    assert claim is not None and not claim.take(running[0]), "the tenant that waits was served more"


@pytest.mark.parametrize(("num_tokens", "claims"), [(10, True), (124, True), (125, False)])
def test_a_tenant_with_a_request_claims_its_share_and_no_more(num_tokens: int, claims: bool) -> None:
    """Half of 64 pages, of which it holds one."""
    waiting = request_of(LIGHT, num_tokens=num_tokens)
    running = [request_of(FLOOD, [0]), request_of(FLOOD, [1]), request_of(LIGHT, [2])]
    shares = shares_of(4, waiting, *running)
    assert (shares.claim(waiting, running, page_size=4) is not None) == claims


def test_the_last_slot_and_claims_are_for_tenants_below_their_share() -> None:
    flood, light = request_of(FLOOD), request_of(LIGHT)
    shares = shares_of(8, *[flood] * 6, *[light] * 3)
    for request in (*[flood] * 5, light, light):
        shares.started(request)
    assert shares.keeps_last_slot(flood) and not shares.keeps_last_slot(light), "3 of 8 are less than half"
    assert shares.some_may_start(1)
    shares.started(flood)
    assert shares.some_may_start(0), "it may claim a slot"
    charge(shares, light, 64)
    assert not shares.some_may_start(0), "it was served more"


def test_tenants_alternate_once_they_run_equally_many() -> None:
    flood, light = request_of(FLOOD, num_tokens=1), request_of(LIGHT, num_tokens=1)
    shares = shares_of(8, flood, light)
    for _ in range(2):
        shares.started(flood)
    queues = {request.request_id: iter([request] * 4) for request in (flood, light)}
    assert [request.request_id for request in shares.interleaved(queues)][:6] == ["light"] * 2 + ["flood", "light"] * 2


def test_parameters_are_checked() -> None:
    assert make_request("r", [1], tenant=LIGHT).tenant == LIGHT and SamplingParams() == SamplingParams()


# --- a limit on running requests while only some may start


ONE = Tenant("one", max_running=1)


def test_a_request_that_may_start_alone_starts_behind_another_of_its_limited_key() -> None:
    """As while the request that makes the device fail is looked for."""
    core = core_of()
    for name in ("first", "second"):
        core.add(make_request(name, prompt(4), max_tokens=9, tenant=ONE))
    output = core.scheduler.schedule(0.0, only={"second"})
    assert output is not None and [row.request_id for row in output.rows] == ["second"]


def test_a_limit_holds_for_all_priorities_of_a_key_together() -> None:
    core = core_of(policy="priority")
    for i in range(3):
        core.add(make_request(f"r{i}", prompt(4), max_tokens=9, tenant=ONE, priority=i))
    output = core.scheduler.schedule(0.0)
    assert output is not None and [row.request_id for row in output.rows] == ["r0"]


def test_a_limit_holds_for_requests_that_have_waited_too_long() -> None:
    core, transcripts = core_of(policy="lpm", aging_steps=3), Transcripts()
    for i in range(4):
        core.add(make_request(f"r{i}", prompt(4), max_tokens=9, tenant=ONE))
    while core.has_work:
        step(core, transcripts)
        assert core.scheduler.stats().num_running <= 1
    assert [len(transcripts[f"r{i}"].token_ids) for i in range(4)] == [9] * 4
