"""From Arrow columns to what the user requests: tensors, arrays, Python lists or Arrow.

It imports only `errors`. A table of rows enters at `transform.ColumnTransform`, which stays in Arrow. `convert` turns
the result into arrays, tensors or lists, which leave as batches.
"""
