"""The cost model of `float8.estimate` and measurements: its figures measured, fitted and checked.

- `measure.py`: the figures of this machine
- `results.py`: the result files of the benchmarks, read
- `fit.py`: figures fitted to times
- `check.py`: predictions compared with times
"""
