"""Progress to a state, and a state back to progress.

Everything here is pure, and imports only `planning` and `errors`. A state leaves at `dump.dump_state`. One from outside
enters at `parse.states.parse_states`, is compared with today's run (`compare`), and becomes progress in the plan that
it was saved under (`restore`) or the baseline of a new plan (`merge`).
"""
