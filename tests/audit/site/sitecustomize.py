"""Found by every Python process that the tests start, by way of PYTHONPATH: puts the audit hook in it."""

import importlib.util
import pathlib
import sys

path = pathlib.Path(__file__).parent.parent / "hook.py"
spec = importlib.util.spec_from_file_location("jaxserve_audit_hook", path)
if spec is not None and spec.loader is not None:
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.addaudithook(module.hook)
