"""Imported first by the fork server, so that it does not look for garbage among what it imports, which stays."""

from __future__ import annotations

import gc

gc.disable()
