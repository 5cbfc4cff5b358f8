"""CSV and JSON Lines: files cut into ranges of lines, each parsed by pyarrow."""
