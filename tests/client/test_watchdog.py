"""The watchdog's judgement, over times that the test makes."""

import pytest

from jaxserve.client.supervisor import LOOK_INTERVAL, MAX_GAP, Watchdog
from jaxserve.transport.shared_state import Pulse


def looks(dog: Watchdog, pulses: list[Pulse], start: float, interval: float = LOOK_INTERVAL) -> float:
    """Look at each of the pulses; the time after them."""
    for pulse in pulses:
        start += interval
        dog.look(pulse, start)
    return start


@pytest.fixture
def dog() -> Watchdog:
    dog = Watchdog()
    dog.start(1000.0)
    dog.look(Pulse(1, 1), 1000.0)
    return dog


def test_an_engine_that_moves_on_is_well(dog: Watchdog) -> None:
    looks(dog, [Pulse(n, n) for n in range(2, 200)], 1000.0)
    assert dog.silent == dog.stuck == 0.0


def test_silence_is_counted_in_seconds(dog: Watchdog) -> None:
    now = looks(dog, [Pulse(1, 1)] * 20, 1000.0)
    assert dog.silent == dog.stuck == pytest.approx(20 * LOOK_INTERVAL)
    looks(dog, [Pulse(2, 1)], now)
    assert dog.silent == 0.0 and dog.stuck == pytest.approx(21 * LOOK_INTERVAL)


def test_one_turn_that_does_not_end(dog: Watchdog) -> None:
    """The heartbeat's thread goes on, the loop does not."""
    looks(dog, [Pulse(n, 1) for n in range(2, 22)], 1000.0)
    assert dog.silent == 0.0 and dog.stuck == pytest.approx(20 * LOOK_INTERVAL)


def test_a_pause_of_all_processes_does_not_count(dog: Watchdog) -> None:
    """After an hour's sleep the judge may look before the engine has beaten again."""
    dog.look(Pulse(1, 1), 4600.0)
    assert dog.silent == dog.stuck == 0.0


def test_a_judge_that_is_held_up_now_and_then(dog: Watchdog) -> None:
    """An engine that does not beat is found by the time in which the judge was awake."""
    now = 1000.0
    for _ in range(10):
        now = looks(dog, [Pulse(1, 1)] * 4, now + 30.0 - LOOK_INTERVAL)
    assert dog.silent == dog.stuck == pytest.approx(10 * 3 * LOOK_INTERVAL)
    assert LOOK_INTERVAL < MAX_GAP < 30.0
