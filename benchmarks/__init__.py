"""Speed and scale, and the tables that the pages show: `python -m benchmarks --list`."""
