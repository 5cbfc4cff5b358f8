"""Arrow's own readers, to whose figures the others' are ratios."""
