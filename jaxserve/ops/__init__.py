"""Device operations: one folder an operation, with its contract, its float32 reference and one file a backend."""
