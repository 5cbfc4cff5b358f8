"""One module for each command.

``add_arguments(parser)`` adds its arguments. ``run(arguments)`` returns a `Report`. What needs torch or Arrow is
imported within ``run``. The docstring is what ``--help`` says.
"""
