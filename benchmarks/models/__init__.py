"""Models that benchmarks train or measure, and the training loop of the small ones."""
