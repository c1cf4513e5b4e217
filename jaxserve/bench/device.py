"""`python -m jaxserve.bench.device`: say where the device suite is, which is not in the package."""

raise SystemExit(
    "the device suite is in the repository, not in the package: run python -m benchmarks.device_suite there"
)
