"""Device operations, one folder each.

paged_attention has a contract, a float32 reference and one file per backend. native has the C kernels for CPUs.
"""
