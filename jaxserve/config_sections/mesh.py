"""The section of the configuration for the devices of an engine."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, ValidationInfo, field_validator

from jaxserve.config_sections.value_types import FilePath, Int, Seconds, Section, Text

DEFAULT_PORT = 29500


class MeshSection(Section):
    """How an engine uses several devices, and how many engines run."""

    replicas: Int = Field(
        1, ge=1, le=64, description="Number of engines behind one address, each with its own devices."
    )
    prefill_replicas: Int = Field(
        0,
        ge=0,
        le=63,
        description="How many of them only compute prompts, and pass the KV pages to the others, which produce the "
        "tokens. 0: each does both.",
    )
    prefill_min_tokens: Int = Field(
        256,
        ge=1,
        le=2**26,
        description="With prefill_replicas: a prompt with fewer tokens that are not cached is computed where its "
        "tokens are produced.",
    )
    data: Int = Field(
        1, ge=1, le=4096, description="Only 1: an engine does not split its requests over devices. Use replicas."
    )
    tensor: Int = Field(
        1, ge=1, le=4096, description="Tensor parallelism: number of devices that share heads, FFN and vocabulary."
    )
    expert: Int = Field(1, ge=1, le=4096, description="Expert parallelism: number of devices that share the experts.")
    device: Literal["auto", "cpu", "gpu", "tpu"] = Field("auto", description="Platform to run on.")
    hosts: Int = Field(
        1, ge=1, le=1024, description="Number of machines whose devices one engine uses; each runs this command."
    )
    cluster: Literal["none", "auto", "lws", "slurm", "gke"] = Field(
        "none",
        description="Whose variables say hosts, host_rank and leader_address where they are not given: "
        "LeaderWorkerSet's (lws), SLURM's, those of TPU slices on GKE, or the ones that are there (auto).",
    )
    host_rank: Int = Field(
        0, ge=0, le=1023, description="Which of these machines this is. 0: the leader, which schedules and serves HTTP."
    )
    leader_address: Text = Field(
        "127.0.0.1",
        description="Name or IPv4 address of the leader, HOST or HOST:PORT, where it listens for the other machines.",
    )
    leader_port: Annotated[Int, Field(ge=1, le=65535)] | None = Field(
        None, description="The port there. Default: that of leader_address, or 29500."
    )
    group_key_file: FilePath | None = Field(
        None,
        description="File with a secret of at least 16 characters, the same on all machines. Only a leader at a "
        "loopback address needs none.",
    )
    join_timeout: Seconds = Field(600.0, description="Seconds that the leader waits for the other machines.")

    @property
    def leader(self) -> tuple[str, int]:
        """Host and port of the leader."""
        host, _, port = self.leader_address.partition(":")
        return host, self.leader_port or int(port or DEFAULT_PORT)

    @field_validator("prefill_replicas")
    @classmethod
    def _leaves_some(cls, count: int, info: ValidationInfo) -> int:
        if count >= (replicas := info.data.get("replicas", count + 1)) and count:
            raise ValueError(f"mesh.replicas is {replicas}, and one of them must produce tokens")
        return count

    @field_validator("leader_port")
    @classmethod
    def _one_port(cls, port: int | None, info: ValidationInfo) -> int | None:
        named = info.data.get("leader_address", "").partition(":")[2]
        if port is not None and named and int(named) != port:
            raise ValueError(f"leader_address has port {named}")
        return port

    @field_validator("leader_address")
    @classmethod
    def _has_a_port(cls, address: str) -> str:
        host, colon, port = address.partition(":")
        if not host or (colon and not (port.isdecimal() and 0 < int(port) < 2**16)):
            raise ValueError("should be HOST or HOST:PORT")
        return address

    @field_validator("host_rank")
    @classmethod
    def _is_a_host(cls, rank: int, info: ValidationInfo) -> int:
        if rank >= (hosts := info.data.get("hosts", rank + 1)):
            raise ValueError(f"there are {hosts} hosts, from 0 to {hosts - 1}")
        return rank
