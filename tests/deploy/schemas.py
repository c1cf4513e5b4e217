"""Hold manifests to the schemas of their custom resources: python -m tests.deploy.schemas CRD.yaml ...

The CRD files are those that the projects publish; they are not in this repository. Objects of other kinds are left out.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import yaml

from tests.deploy.manifests import DEPLOY, KUBERNETES, documents

Schemas = dict[tuple[str, str], Any]


def schemas_of(paths: list[Path]) -> Schemas:
    """Return {(apiVersion, kind): schema} of CRD files."""
    found: Schemas = {}
    for path in paths:
        for crd in yaml.load_all(path.read_text(encoding="utf-8"), yaml.CSafeLoader):
            if crd and crd.get("kind") == "CustomResourceDefinition":
                spec = crd["spec"]
                for version in spec["versions"]:
                    name = f"{spec['group']}/{version['name']}", spec["names"]["kind"]
                    found[name] = strict(version["schema"]["openAPIV3Schema"])
    return found


def strict(schema: Any) -> Any:
    """Return the schema with unknown fields forbidden, as a server refuses them with strict validation."""
    closed = copy.copy(schema)
    if closed.get("x-kubernetes-int-or-string"):
        return {"type": ["integer", "string"]}
    if "properties" in closed:
        closed["properties"] = {name: strict(each) for name, each in closed["properties"].items()}
        if not closed.get("x-kubernetes-preserve-unknown-fields"):
            closed.setdefault("additionalProperties", False)
    for key in ("items", "additionalProperties"):
        if isinstance(closed.get(key), dict):
            closed[key] = strict(closed[key])
    return closed


def problems(found: Any, schema: Any) -> Iterator[str]:
    """Yield what is wrong with one object. Its metadata is every object's, and not checked."""
    body = {**found, "metadata": {}}
    schema = {**schema, "properties": {**schema["properties"], "metadata": {"type": "object"}}}
    for error in jsonschema.Draft202012Validator(schema).iter_errors(body):
        yield f"{'.'.join(map(str, error.absolute_path))}: {error.message[:200]}"


def main() -> int:
    schemas, wrong = schemas_of([Path(word) for word in sys.argv[1:]]), 0
    for path in sorted(KUBERNETES.rglob("*.yaml")):
        for found in documents(path):
            schema = schemas.get((found.get("apiVersion", ""), found.get("kind", "")))
            if schema is None:
                continue
            said = list(problems(found, schema))
            wrong += len(said)
            print(f"{path.relative_to(DEPLOY)}: {found['kind']}: {said or 'valid'}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
