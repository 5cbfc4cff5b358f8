"""Arrow columns to what the user asked for: tensors, arrays, lists or Arrow.

It imports only `errors`. A table of rows enters at `transform.ColumnTransform`, which stays in Arrow, and goes on to
`convert`; batches of columns leave.
"""
