"""A plugin for each file format: what its files say of themselves, and how their bytes become rows.

It imports `columns`, `planning`, `storage` and `errors`. The formats do not know one another: what all of them provide
is in `base`, and `registry` finds a format by its name. Files enter at `Format.describe`; Arrow tables leave at
`Codec.open`. `opened_files` has what a dataset and its readers know of files; a format sees the part of it that
`base.FilesToRead` names. `cpus` and `concurrency` say how much is done at once.
"""
