"""Resume a loader from a state, in this process or in a new one, and return the rows that it delivers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from faults.outcome import Row, rows_in
from jobs.forked import run_forked
from support import open_loader

PROGRAM = """
import json, sys
from pathlib import Path
from jobs.resuming import rest_of

if __name__ == "__main__":
    path, state, options = map(json.loads, sys.argv[1:4])
    Path(sys.argv[4]).write_text(json.dumps(rest_of(path, state, options)), encoding="utf-8")
"""


def rest_of(path: str, state: dict[str, Any], options: dict[str, Any]) -> list[Row]:
    """Return the rows that a new loader delivers from a state on."""
    loader, _ = open_loader(path, **options)
    loader.load_state_dict(state)
    return [row for batch in loader for row in rows_in(batch)]


def resumed(loader: Any, path: Path, options: dict[str, Any], directory: Path, *, in_new_process: bool) -> list[Row]:
    """Return the rows that are left after a loader's state: of the loader itself, or of a new one in a new process."""
    state = loader.state_dict()
    if in_new_process:
        return rest_of_in_new_process(path, state, options, directory)
    loader.load_state_dict(state)
    return [row for batch in loader for row in rows_in(batch)]


def rest_of_in_new_process(path: Path, state: dict[str, Any], options: dict[str, Any], directory: Path) -> list[Row]:
    """Return the rows that a new loader in a new process delivers from a state on. All arguments travel as JSON."""
    result = directory / "rest.json"
    run_forked(PROGRAM, directory, json.dumps(str(path)), json.dumps(state), json.dumps(options), str(result))
    return [(row, content) for row, content in json.loads(result.read_text(encoding="utf-8"))]
