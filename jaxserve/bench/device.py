"""`python -m jaxserve.bench.device`: where the device suite is. It is no part of the package."""

raise SystemExit(
    "the device suite is in the repository, not in the package: run python -m benchmarks.device_suite there"
)
