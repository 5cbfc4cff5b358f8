"""From Arrow columns to what the user asked for: tensors, arrays, Python lists or Arrow.

It imports only `errors`. A table of rows enters at `transform.ColumnTransform`, which stays in Arrow. `convert` turns
the result into tensors and arrays, which leave as batches.
"""
