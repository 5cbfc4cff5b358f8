"""CSV and JSON Lines: files cut into ranges of lines, each parsed by pyarrow.

A text file has no footer. `format` makes one (`footer`) from the file's beginning: its columns, and the byte offsets
where ranges begin. `codec` gives each range to a parser, `csv` or `jsonl`, which names the file and the line of an
error. Both accept what pyarrow accepts, except what pyarrow accepts in silence or dies of: a quoted value that the file
ends in, zero bytes, several objects in a line, `null` in the place of an object, and values nested ten thousand deep.

Text files do not say how many rows they have. Unless `count_rows` counts them, a range is planned as though each of
its bytes were a row, and a filter left some of them. So reading alone tells how many rows a shard delivers. States
record such ranges as `byte_offset` and `byte_length`. A compressed file counts as many bytes as its text can have at
most. `RowGroup.expected` estimates the rows from the file's beginning; it is kept with the footer, so that every rank
uses the same estimate.
"""
