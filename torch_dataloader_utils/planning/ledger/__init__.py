"""Which rows a step has, and which step has a row: segments of an epoch, and the lookup in their plans. Pure.

A `Segment` and the `Plan` of its steps enter at `lookup.SegmentLedger`; `Rows` and `RowStep`s leave.
"""
