"""The version, readable without the package's metadata (a checkout that is not installed). pyproject.toml reads it here."""

__version__ = "0.1.0"
