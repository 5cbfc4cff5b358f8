"""Loaders under the same training job, one module each: see ``faults.trainer``."""
