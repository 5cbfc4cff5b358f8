"""Row groups to batches, in the process that reads them, within a memory budget.

It imports `formats`, `columns`, `planning`, `storage` and `errors`. An `Assignment` enters at
`stream.read_assignment`; batches leave, each with the receipt that says how far its stream has come.

A stream holds at most `read_ahead_bytes` of decoded bytes that are not delivered yet (`memory_budget`). Their size is
known exactly for columns of fixed width. For others it is estimated from the footer and from the row groups decoded
so far. Beside the budget there are: a worker's blocks of shared memory; for remote files the compressed bytes of two
row groups that are read in parts; a batch that is larger than the budget; and what the training loop keeps.
"""
