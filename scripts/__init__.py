"""Programs to run: training, its demo, reports about kernels and clusters, and checks.

What they share is in `training/` (the GPT, its data, options and processes; the cluster) and in
`sass/` (machine code, read as text). Each runs as a file, from a checkout, without installation.
"""
