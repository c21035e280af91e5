"""What smart prefill costs in quality, on real weights: `make eval`, or `python -m eval --help`."""
