"""What benchmarks train and measure: one transformer with its variants, and text to train on."""
