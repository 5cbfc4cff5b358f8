"""The command line ``tdu``: a thin layer over everything else.

A module of `commands` is a command. Its ``run`` takes the parsed arguments and returns a `Report`: a plain value for
``--json``, and blocks of text. `output` prints them, with rich on a terminal. A command imports torch and Arrow within
``run``, so that ``tdu --help`` is quick. This folder imports from all others but the integrations; none imports from
it.
"""
