"""The engine process: `python -m jaxserve.engine.process DIR`, started only by ProcessLink."""

from jaxserve.engine.child import main
from jaxserve.engine.factory import build_process

if __name__ == "__main__":
    main(build_process)
