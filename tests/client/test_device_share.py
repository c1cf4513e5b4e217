"""What each engine process of a server may use."""

from __future__ import annotations

from jaxserve.client.link import DeviceShare, device_shares
from jaxserve.config import Config


def test_engines_that_compute_prompts_have_a_lower_priority_on_a_cpu() -> None:
    config = Config.parse({"mesh": {"replicas": 3, "prefill_replicas": 1}})
    shares = device_shares(config, "cpu", cores=[0, 1, 2, 3])
    assert shares == [
        DeviceShare(cores=frozenset({0}), niceness=5),
        DeviceShare(cores=frozenset({1})),
        DeviceShare(cores=frozenset({2, 3})),
    ]
    joint = device_shares(config.replace(mesh={"prefill_replicas": 0}), "cpu", cores=[0, 1, 2])
    assert [share.niceness for share in joint] == [0, 0, 0]
    assert [share.niceness for share in device_shares(config, "gpu", {})] == [0, 0, 0]
