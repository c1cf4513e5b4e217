"""The version, readable without the package's metadata (in a checkout). pyproject.toml reads it here."""

__version__ = "0.3.0"
