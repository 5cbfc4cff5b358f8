"""One plugin for each file format: what its files say of themselves, and the way from their bytes to rows.

It imports `columns`, `planning`, `storage` and `errors`. The formats do not know one another: what all of them bring is
in `base`, and `registry` finds one by its name. Files enter at `Format.describe`; Arrow tables leave at `Codec.open`.
"""
