"""`python -m jaxserve.cli.owned_server FLAGS`: `jaxserve launch` for one parent. It drains and ends when stdin closes.

So no server keeps the memory of its devices if the parent ends by a signal.
"""

from __future__ import annotations

import os
import signal
import sys
import threading

from jaxserve.cli.main import main
from jaxserve.transport.child import wait_for_end


def _end_with_stdin() -> None:
    wait_for_end()
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    threading.Thread(target=_end_with_stdin, name="parent-watch", daemon=True).start()
    sys.exit(main(["launch", *sys.argv[1:]]))
