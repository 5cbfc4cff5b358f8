"""The file formats, one module each: row ranges from metadata, rows as Arrow."""
