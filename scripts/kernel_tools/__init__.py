"""Tools for Triton kernels that need no GPU; README.md says how to use them."""
