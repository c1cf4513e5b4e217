"""Serve models under Ray Serve: `serve run configs/ray.yaml` imports `jaxserve.ray:build_app`.

No other folder of jaxserve imports this one, and only deployments.py imports Ray itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def build_app(args: Mapping[str, Any]) -> Any:
    """Build the Serve application of one model.

    args: the arguments of `ray.serve.llm:build_openai_app`, see settings.py
    Raises ConfigError for a key that does not fit, and ImportError without the extra `ray`.
    """
    from jaxserve.ray.deployments import application  # noqa: PLC0415  # imports ray, an optional dependency

    return application(args)
