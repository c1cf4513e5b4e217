"""A child that answers its configuration with a file in its directory, and then waits, or ends with a status."""

import sys
import time
from pathlib import Path

if __name__ == "__main__":
    line = sys.stdin.readline()
    (Path(sys.argv[1]) / "read").write_text(line)
    if line.startswith("end"):
        sys.exit(int(line.split()[1]))
    time.sleep(600)
