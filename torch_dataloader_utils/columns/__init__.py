"""What becomes of columns: what the user chose for them, done in Arrow, then tensors, arrays and lists."""
