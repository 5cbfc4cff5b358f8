"""Files and options to an epoch's plan: shards, their order, and which stream reads what.

Everything here is pure: values in, values out, no I/O, no clock, no process state. It imports nothing of the package
but `errors`. A manifest and `PlanOptions` enter at `planner.make_plan`; a `Plan` leaves, and streams of it are read.
`mixture` plans several sources in one epoch. `ledger` says which rows of a plan a step has.
"""
