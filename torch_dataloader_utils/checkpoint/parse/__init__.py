"""States from outside to checked values: each has the right type and range, or an error names it. Pure.

Any value enters at `states.parse_states`. `SavedState`s leave, which nothing further in has to doubt.
"""
