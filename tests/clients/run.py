"""Run clients against two servers, and print the table of docs/clients.md: python -m tests.clients.run DIR URL AGENTS

DIR holds their environments (tests/clients/environments.py). URL: a server of the demo model. AGENTS: one of the model
of tests/clients/scripted_model.py, named `scripted`, which coding agents are run with.
"""

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

SCRIPTS = Path(__file__).parent / "scripts"
DEMO = Path(__file__).parents[2] / "jaxserve" / "assets" / "demo"
CAPABILITIES = ("text", "stream", "tools", "tool loop", "JSON schema", "logprobs", "embeddings", "rerank")
# their prompts are too long for the demo model
AGENTS = ("use_aider.py", "use_claude-code.mjs", "use_codex.mjs", "use_continue.mjs", "use_opencode-ai.mjs")
# of clients that have another name in the table
NPM_NAMES = {
    "ai-sdk-openai": "@ai-sdk/openai",
    "anthropic-ai-sdk": "@anthropic-ai/sdk",
    "claude-code": "@anthropic-ai/claude-code",
    "codex": "@openai/codex",
    "continue": "@continuedev/cli",
}
TIME_LIMIT = 240.0  # seconds; a client takes some 5, and those that start programs of their own up to 40
# nothing is to be fetched, and no proxy is to stand before the server
OFFLINE = {"no_proxy": "127.0.0.1", "DO_NOT_TRACK": "1", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}


def scripts(kind: str = "use") -> list[str]:
    """The scripts of clients: `use` tries all that a client has, `look` sends pictures to the model with a tower."""
    return sorted(path.name for path in SCRIPTS.glob(f"{kind}_*"))


def interpreter(script: str, root: Path) -> Path:
    """What must be there for the script to run."""
    name = script.partition("_")[2].partition(".")[0]
    if script.endswith(".mjs"):
        return root / "node" / "node_modules" / NPM_NAMES.get(name, name)
    return root / name / "bin" / "python"


def run_client(script: str, root: Path, url: str) -> dict[str, Any]:
    """{"client", "version", "results": {capability: "ok" or what went wrong}}"""
    if script.endswith(".mjs"):  # modules are looked up from where the script lies
        for source in (SCRIPTS / "common.mjs", SCRIPTS / script):
            shutil.copy(source, root / "node")
        command, folder = ["node", script, url], root / "node"
    else:
        command, folder = [str(interpreter(script, root)), script, url], SCRIPTS
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment |= OFFLINE | {"PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=TIME_LIMIT, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1]) | {"errors": done.stderr[-6000:]}


def row(script: str, found: dict[str, Any]) -> str:
    kind = "npm" if script.endswith(".mjs") else "PyPI"
    cells = [found["results"].get(name, "-") for name in CAPABILITIES]
    return " | ".join([f"| {found['client']} ({kind})", found["version"], *cells]) + " |"


def main() -> None:
    root, url, agents = Path(sys.argv[1]).resolve(), *sys.argv[2:]
    print("| client | version | " + " | ".join(CAPABILITIES) + " |")
    print("|---" * (2 + len(CAPABILITIES)) + "|")
    for script in scripts():
        began = time.monotonic()
        found = run_client(script, root, agents if script in AGENTS else url)
        print(row(script, found))
        print(f"{script} {time.monotonic() - began:.1f} s", found["errors"], file=sys.stderr)


if __name__ == "__main__":
    main()
