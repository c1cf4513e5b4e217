"""The numeric check of a start: small programs of the kernels that serve, compared with numpy."""
