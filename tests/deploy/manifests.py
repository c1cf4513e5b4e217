"""What the files of deploy/ say: their documents, and how each of them starts the server."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from jaxserve.cli.options import load_config
from jaxserve.config import Config

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
KUBERNETES = DEPLOY / "kubernetes"
MONITORING = KUBERNETES / "components" / "monitoring"
MOUNTED = "/etc/jaxserve/jaxserve.yaml"
DOCKERFILE = (DEPLOY / "Dockerfile").read_text(encoding="utf-8").replace("\\\n", " ")


class Start(NamedTuple):
    """How a file starts the server. file: what lies at MOUNTED; volumes: directories that survive a restart."""

    words: list[str]
    environ: Mapping[str, str]
    file: Path
    grace: float  # seconds from SIGTERM to SIGKILL
    volumes: list[str]

    @property
    def config(self) -> Config:
        """Raises ConfigError for a flag, a variable or a key that does not exist."""
        words = [str(self.file) if word == MOUNTED else word for word in self.words]
        assert words[0] == "launch"
        return load_config(words[1:], self.environ)


def documents(path: Path) -> list[Any]:
    return list(yaml.safe_load_all(path.read_text(encoding="utf-8")))


def objects() -> Iterator[Any]:
    """Yield the objects of the base and of the monitoring component."""
    for path in [*(KUBERNETES / "base").glob("*.yaml"), *MONITORING.glob("*.yaml")]:
        yield from (each for each in documents(path) if "kind" in each)


def of_kind(kind: str) -> list[Any]:
    return [each for each in objects() if each["kind"] == kind]


def instruction(name: str) -> str:
    """Return the text of the Dockerfile's last instruction of this name."""
    return re.findall(rf"^{name} (.*)$", DOCKERFILE, re.MULTILINE)[-1]


def image() -> Start:
    environ = dict(word.split("=", 1) for word in shlex.split(instruction("ENV")))
    words = json.loads(instruction("ENTRYPOINT")) + json.loads(instruction("CMD"))
    assert words[0] == "jaxserve"
    return Start(words[1:], environ, ROOT / "configs" / "demo.yaml", 60, json.loads(instruction("VOLUME")))


def compose() -> Start:
    service = documents(DEPLOY / "compose.yaml")[0]["services"]["jaxserve"]
    environ = {key: re.sub(r"\$\{\w+:[?-][^}]*\}", "secret", value) for key, value in service["environment"].items()}
    mounts = dict(volume.split(":")[:2] for volume in service["volumes"])
    inside = {target: source for source, target in mounts.items()}
    file = (DEPLOY / inside.pop(MOUNTED)).resolve()
    grace = float(service["stop_grace_period"].removesuffix("s"))
    return Start(service["command"], {**image().environ, **environ}, file, grace, list(inside))


def unit() -> Start:
    text = (DEPLOY / "systemd" / "jaxserve.service").read_text(encoding="utf-8")
    keys = dict(re.findall(r"^(\w+)=(.*)$", text, re.MULTILINE))
    text = keys["Environment"].replace("%C", "/var/cache").replace("%S", "/var/lib")
    environ = dict(word.split("=", 1) for word in shlex.split(text))
    volumes = [f"/var/cache/{keys['CacheDirectory']}", f"/var/lib/{keys['StateDirectory']}"]
    words = shlex.split(keys["ExecStart"])
    return Start(words[1:], environ, ROOT / "configs" / "demo.yaml", float(keys["TimeoutStopSec"]), volumes)


def pod() -> Any:
    return of_kind("StatefulSet")[0]["spec"]["template"]["spec"]


def kubernetes() -> Start:
    [container] = pod()["containers"]
    environ = {entry["name"]: entry.get("value", "secret") for entry in container["env"]}
    claimed = {claim["metadata"]["name"] for claim in of_kind("StatefulSet")[0]["spec"]["volumeClaimTemplates"]}
    volumes = [mount["mountPath"] for mount in container["volumeMounts"] if mount["name"] in claimed]
    before = float(container["lifecycle"]["preStop"]["exec"]["command"][1])
    grace = pod()["terminationGracePeriodSeconds"] - before
    file = KUBERNETES / "base" / "jaxserve.yaml"
    return Start(container["args"], {**image().environ, **environ}, file, grace, volumes)


STARTS = {"image": image, "compose": compose, "systemd": unit, "kubernetes": kubernetes}
