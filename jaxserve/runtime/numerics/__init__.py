"""The choice of products, and the numeric check of a start: small programs of the kernels that serve, beside numpy."""
