"""`python -m jaxserve` is `jaxserve`."""

import sys

from jaxserve.cli import main

sys.exit(main())
