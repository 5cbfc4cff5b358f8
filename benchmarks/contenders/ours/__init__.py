"""This library's loader. These scripts use its public API alone, so that they run with any version of it."""
