"""What the loader costs beside raw Arrow and its peers: `python -m benchmarks` lists the commands."""
