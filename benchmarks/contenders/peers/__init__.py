"""Other loaders, one script each, and beside it the pinned requirements of its virtual environment.

Each is set up with the fastest settings that its documentation names.
"""
