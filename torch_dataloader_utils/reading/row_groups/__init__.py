"""Row groups of files to Arrow tables: requested ahead of need, decoded several at once, returned in order.

`FileRowGroup`s enter at `reader.RowGroupReader`; tables of the rows that a filter keeps leave. Bytes come from
`fetcher`, tables from `decoder`. How row groups are spread over batches, and what waits in memory, is decided outside.
"""
