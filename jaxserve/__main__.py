"""Runs the command line: `python -m jaxserve` does the same as `jaxserve`."""

import sys

if not sys.flags.safe_path:
    del sys.path[0]  # `python -m` put the working directory there, which may be a model's

from jaxserve.cli import main

sys.exit(main())
