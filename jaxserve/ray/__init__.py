"""jaxserve under Ray Serve: `serve run configs/ray.yaml` imports `jaxserve.ray:build_app`.

Nothing else of jaxserve imports this folder. Ray itself is imported by deployments.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def build_app(args: Mapping[str, Any]) -> Any:
    """Build the Serve application of one model. args: as `ray.serve.llm:build_openai_app` takes them, see settings.py

    Raises ConfigError for a key that does not fit, and ImportError without the extra `ray`.
    """
    from jaxserve.ray.deployments import application  # noqa: PLC0415  # imports ray, an optional dependency

    return application(args)
