"""Device operations. Each operation has a folder with its contract, a float32 reference and one file per backend."""
