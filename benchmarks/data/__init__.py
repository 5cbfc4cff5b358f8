"""The data sets: what is in them (`recipes`), and how they are written to build/bench/data (`dataset`)."""
