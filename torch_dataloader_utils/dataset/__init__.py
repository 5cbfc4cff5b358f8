"""`StructuredDataset`: arguments checked, files found and opened, the loader made.

It imports everything below it; only tables and the helpers for many ranks are above. A path enters at
`structured.StructuredDataset.create_dataloader`: `options` checks the arguments, `file_set` lists the files, and
`discovery` reads their footers.
"""
