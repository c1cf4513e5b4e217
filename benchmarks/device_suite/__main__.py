"""`python -m benchmarks.device_suite`: see `suite`."""

from __future__ import annotations

import sys

from benchmarks.device_suite.suite import main

if __name__ == "__main__":
    sys.exit(main())
