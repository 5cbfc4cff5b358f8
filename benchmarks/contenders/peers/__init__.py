"""Other loaders, one script each, and next to it the pinned requirements of its virtual environment.

Each is set up with the fastest settings that its documentation names.
"""
