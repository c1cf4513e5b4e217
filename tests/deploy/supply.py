"""Check what an installed package brings with it: its bill of materials, and the weaknesses that pip-audit knows.

    python tests/deploy/supply.py ENVIRONMENT BILL AUDIT

BILL: written by `cyclonedx-py environment`. AUDIT: written by `pip-audit --format json`, which writes nothing if its
database is not reached. Run by `.ci/package`. Needs nothing but Python, and imports nothing of the repository.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path


def check_bill(environment: Path, bill: Path) -> None:
    """Compare the components of the bill with the installed distributions."""
    listed = {_plain(part["name"]) for part in json.loads(bill.read_text(encoding="utf-8"))["components"]}
    folders = environment.glob("lib/python3*/site-packages/*.dist-info")
    installed = {_plain(folder.name.partition("-")[0]) for folder in folders}
    assert installed and listed == installed, f"not the same: {sorted(listed ^ installed)}"
    print(f"{len(listed)} distributions are in the bill of materials")


def check_audit(audit: Path) -> None:
    """Raise AssertionError if a distribution has a known weakness, and say of how many something is known."""
    if not audit.exists():
        print("pip-audit did not reach its database: nothing is known of weaknesses")
        return
    found = json.loads(audit.read_text(encoding="utf-8"))["dependencies"]
    weak = {each["name"]: [one["id"] for one in each["vulns"]] for each in found if each.get("vulns")}
    unknown = sorted(each["name"] for each in found if "skip_reason" in each)
    print(f"{len(found) - len(unknown)} distributions were audited; pip-audit knows nothing of {', '.join(unknown)}")
    assert not weak, f"known weaknesses: {weak}"


def _plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


if __name__ == "__main__":
    check_bill(Path(sys.argv[1]), Path(sys.argv[2]))
    check_audit(Path(sys.argv[3]))
