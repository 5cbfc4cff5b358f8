"""The states of all ranks to one baseline, from which an elastic load plans the rest of an epoch. Pure.

`SavedState`s enter at `states.merge_states`. What they delivered, by content, leaves as `Merged`.
"""
