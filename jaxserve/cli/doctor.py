"""`jaxserve doctor [MODEL]`: check the machine, the configuration and the model, without loading a weight.

Prints one line per finding and what to do about it. Exit code 1 if one is wrong, 0 if all can serve.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from jaxserve.cli.checks.findings import BAD, Finding, Findings, examined
from jaxserve.cli.checks.host_findings import caches, disk, host_memory, hub, port, store, versions
from jaxserve.cli.main import imported
from jaxserve.cli.options.settings import load_config
from jaxserve.config import Config
from jaxserve.errors import ConfigError


def run(words: Sequence[str]) -> int:
    """Run the command `doctor` and return 0, or 1 if a finding is bad."""
    options, rest = _parser().parse_known_args(words)
    found: list[Finding] = []
    for finding in findings(rest):
        found.append(finding)
        if not options.json:
            print(finding.line(), flush=True)
    bad = sum(finding.state == BAD for finding in found)
    if options.json:
        print(json.dumps({"ok": not bad, "findings": [asdict(finding) for finding in found]}, indent=2))
    else:
        print(f"\n{bad or 'none'} of {len(found)} findings must be mended")
    return 1 if bad else 0


def findings(words: Sequence[str]) -> Iterator[Finding]:
    """Yield what is found, the cheap checks first. words: model and flags, as of `launch`."""
    yield from examined("versions", versions)
    notices: list[str] = []
    try:
        config = load_config(words, os.environ, notice=notices.append)
    except ConfigError as error:
        yield Finding.of("config", error)
        yield from examined("memory", host_memory)
        yield from _device_checks().findings(Config(), with_model=False)  # of which model is not known
        return
    for notice in notices:
        yield Finding("config", "warn", notice)
    yield Finding("config", "ok", "the configuration is valid")
    yield from host_findings(config)
    yield from _device_checks().findings(config)


def _device_checks() -> Any:
    return imported("jaxserve.cli.checks.device_findings")  # imports jax


def host_findings(config: Config) -> Iterator[Finding]:
    """Yield what needs no device."""
    checks: dict[str, Findings] = {
        "memory": host_memory,
        "disk": lambda: disk(config),
        "port": lambda: port(config.server),
        "store": lambda: store(config.store),
        "caches": lambda: caches(config.runtime),
        "hub": lambda: hub(config.model),
    }
    for name, check in checks.items():
        yield from examined(name, check)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "jaxserve doctor", description=__doc__, allow_abbrev=False, epilog="Other flags are those of jaxserve launch."
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser
