"""Row groups to batches, in the process that reads them, within a memory budget.

It imports `formats`, `columns`, `planning`, `storage` and `errors`. An `Assignment` enters at
`virtual_streams.read_assignment`; batches leave, each with the receipt that says how far its stream has come.
"""
