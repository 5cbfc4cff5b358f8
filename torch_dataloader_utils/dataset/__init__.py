"""`StructuredDataset`: files found and opened, arguments checked, the loader made.

It imports all that is below it. A path enters at `structured.StructuredDataset.create_dataloader`, becomes a list of
files in `file_set` and a opened files of row groups in `discovery`.
"""
