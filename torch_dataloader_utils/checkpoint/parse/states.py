"""A state from outside to frozen values. Pure.

Every value is checked before anything uses it: a damaged state raises a ``ValueError`` that names the wrong value,
never a ``KeyError`` further on. The modules `parse_files`, `parse_rows`, `parse_skips` and `parse_mixture` check its
parts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeVar

from torch_dataloader_utils.checkpoint.checksum import checksum_of, part_digest
from torch_dataloader_utils.checkpoint.json_value import JsonValue
from torch_dataloader_utils.checkpoint.parse.files import parse_bindings, parse_listed_files
from torch_dataloader_utils.checkpoint.parse.mixture import parse_mixture
from torch_dataloader_utils.checkpoint.parse.rows import (
    FileTree,
    parse_partial_shards,
    parse_rising_numbers,
    parse_rows,
)
from torch_dataloader_utils.checkpoint.parse.skips import parse_skips, parse_steps
from torch_dataloader_utils.checkpoint.saved_exclusions import parse_delivered, parse_exclusions
from torch_dataloader_utils.checkpoint.saved_state import (
    STATE_VERSION,
    SavedBaseline,
    SavedRows,
    SavedState,
)
from torch_dataloader_utils.errors import shown
from torch_dataloader_utils.planning.plan import UNEVEN_RANKS
from torch_dataloader_utils.planning.row_hash import RankHashes, RowHash
from torch_dataloader_utils.planning.row_ranges import Windows
from torch_dataloader_utils.planning.token_budget import OVERSIZED, TokenBudget

T = TypeVar("T")

MOST_WORKERS = 10_000
"""More workers than any machine runs. A larger number is damage, and planning for it would take hours."""

MOST_EPOCHS = 2**63 - 1
"""Copies of a dataset in other processes learn the epoch as an integer of 64 bits."""

PUBLISHED_KEYS = {"epoch", "_num_workers", "_shuffle_seed", "completed_shards"}
"""All that a state of the other package has: torch-dataloader-utils 0.2.0, which PyPI has under this name."""

OWN_KEYS = {"version", "plan", "next_worker"}
"""Some that every state of this package has."""


def parse_states(raw: object) -> list[SavedState]:
    """Check a state, or a list of states, and return them as frozen values. What is equal in all is checked once."""
    states = list(raw) if isinstance(raw, (list, tuple)) else [raw]
    if not states:
        msg = "not a state of this package: state is an empty list, expected this rank's state or those of all ranks"
        raise ValueError(msg)
    try:
        shared = _Shared()
        return [parse_state(state, shared) for state in states]
    except RecursionError:
        raise ValueError("not a state of this package: it is nested too deeply") from None


class _Shared:
    """Large parts that states of several ranks may share: their files, and what was delivered before an elastic load.

    There may be thousands of ranks. So each part is checked once, and digested once if it is one object in all states.
    """

    def __init__(self) -> None:
        self._parsed: dict[str, tuple[tuple[Any, ...], Any]] = {}
        self._digests: dict[str, tuple[Any, bytes]] = {}

    def parsed(self, key: str, depends_on: tuple[Any, ...], parse: Callable[[], T]) -> T:
        """Return a part as it is parsed. `depends_on` is all that determines it: objects of the states by their ids."""
        if key not in self._parsed:
            self._parsed[key] = depends_on, parse()
        known, parsed = self._parsed[key]
        return parsed if known == depends_on else parse()

    def digests(self, state: JsonValue) -> dict[str, bytes]:
        """Return the digests of these parts of a state."""
        found = {}
        for key in ("files", "base"):
            value = state[key].value
            if key not in self._digests:
                self._digests[key] = value, part_digest(key, value)
            if self._digests[key][0] is value:
                found[key] = self._digests[key][1]
        return found


def parse_state(raw: object, shared: _Shared | None = None) -> SavedState:
    """Check a state and return it as frozen values, or raise a ValueError that names the wrong value.

    `shared` is what states that are parsed together may share.
    """
    shared = shared or _Shared()
    state = JsonValue(raw, "state")
    if state.mapping().keys() == PUBLISHED_KEYS:
        raise _saved_by_published_package(_epoch(state["epoch"]))
    if state["version"].missing:
        _refuse_checkpoint(state.mapping())
    version = state["version"].integer()
    if version != STATE_VERSION:
        msg = f"the state has version {version}, this release reads version {STATE_VERSION}: "
        raise ValueError(msg + "load it with the release that saved it")
    plan = state["plan"]
    root = plan["root"].string()
    settings = _settings(state, plan)
    next_worker = state["next_worker"].integer()
    if next_worker >= max(1, settings["virtual_workers"] or settings["num_workers"]):
        raise state["next_worker"].fail(f"less than the number of workers, {settings['num_workers']}")
    listed = state["files"]
    files, rows_of_files = shared.parsed("files", (listed.value,), partial(parse_listed_files, listed))
    is_open_ended = settings["unit"] != "rows" and state["mixture"].missing
    tree = FileTree(root, rows_of_files, settings["rows"], is_open_ended)
    rows = parse_rows(state, tree)
    epoch = _epoch(state["epoch"])
    excluded = parse_exclusions(state["excluded"], settings["rows"])
    saved = SavedState(
        settings=settings,
        epoch=epoch,
        batches_delivered=state["batches_delivered"].integer(),
        next_worker=next_worker,
        fingerprint=plan["fingerprint"].string(),
        root=root,
        files=files,
        completed=rows.completed,
        completed_rows=rows.completed_rows,
        in_progress=rows.in_progress,
        baseline=shared.parsed(
            "base",
            (id(state["base"].value), id(rows_of_files), root, is_open_ended, settings["rows"]),
            partial(_baseline, state["base"], tree),
        ),
        plan_digest=None if state["plan_digest"].missing else state["plan_digest"].optional_string(),
        filter_bindings=parse_bindings(plan["filter_bindings"], files),
        skips=None if state["skipped"].missing else parse_skips(state["skipped"], partial(parse_rows, tree=tree)),
        excluded=excluded,
        excluded_delivered=parse_delivered(state["excluded"], excluded, epoch, settings["rows"]),
        hashes=None if state["delivered_hash"].missing else _hashes(state["delivered_hash"]),
        batch_size=None if state["batch_size"].missing else state["batch_size"].optional_integer(1),
        drop_last=None if state["drop_last"].missing or state["drop_last"].is_null else state["drop_last"].boolean(),
        batching=None if plan["batching"].missing else _batching(plan["batching"]),
        mixture=None if state["mixture"].missing else parse_mixture(state["mixture"], tree),
    )
    _require_checksum(state, shared)  # last: an error that names a wrong value says more
    return saved


def _refuse_checkpoint(value: Mapping[str, Any]) -> None:
    """Raise if a dictionary is no state, but holds one, or a list of states, as checkpoints with a model do."""
    for key, inner in value.items():
        parts = inner if isinstance(inner, (list, tuple)) else [inner]
        if parts and all(isinstance(part, Mapping) and part.keys() >= OWN_KEYS for part in parts):
            what = "a state" if parts[0] is inner else "states"
            raise ValueError(
                f"not a state of this package, but a checkpoint that holds {what} under {key!r}: pass that"
            )


def _saved_by_published_package(epoch: int) -> ValueError:
    msg = "not a state of this package: it was saved by the package that PyPI has under the same name, "
    msg += "torch-dataloader-utils 0.2.0. It lists the workers that have ended, not the rows that were delivered, so "
    msg += f"nothing can continue from it here. Begin the epoch again, with set_epoch({epoch}); or finish it with that "
    return ValueError(f"{msg}package, and go on here with set_epoch({epoch + 1})")


def _epoch(epoch: JsonValue) -> int:
    if epoch.integer() > MOST_EPOCHS:
        raise epoch.fail("an integer of at most 63 bits")
    return epoch.integer()


def _require_checksum(state: JsonValue, shared: _Shared) -> None:
    """Raise if a state has a checksum that is not its own. States of earlier releases have none."""
    if state["checksum"].missing:
        return
    saved = state["checksum"].string()
    try:
        found = checksum_of(state.mapping(), shared.digests(state))
    except (TypeError, ValueError) as error:
        raise ValueError(f"not a state of this package: {error}") from None
    if saved != found:
        msg = f"not a state of this package: its checksum is {shown(saved)}, and that of what it holds {found}: it was "
        raise ValueError(msg + "damaged or edited after it was saved")


def _baseline(base: JsonValue, tree: FileTree) -> SavedBaseline | None:
    if base.is_null:
        return None
    return SavedBaseline(
        batches_delivered=base["batches_delivered"].integer(),
        completed_rows=parse_rising_numbers(base["completed_rows"], tree.dataset_rows),
        in_progress=parse_partial_shards(base["in_progress"], tree),
        left_out=tuple(path.string() for path in base["left_out"].items()),
        skipped=None if base["skipped"].missing else _skipped_rows(base["skipped"], tree),
        hashes=tuple(_hashes(load) for load in base["delivered_hash"].optional_items()),
        gone=0 if base["gone"].missing else base["gone"].integer(),
    )


def _batching(budget: JsonValue) -> TokenBudget:
    column, tokens, padded = budget["column"].string(), budget["tokens"].integer(1), budget["padded"].boolean()
    oversized = budget["oversized"].choice(OVERSIZED)
    return TokenBudget(column, tokens, padded, next(known for known in OVERSIZED if known == oversized))


def _hashes(entries: JsonValue) -> RankHashes:
    hashes = tuple((entry["rank"].integer(), _row_hash(entry)) for entry in entries.items())
    if len({rank for rank, _ in hashes}) < len(hashes):
        raise entries.fail("each rank once")
    return hashes


def _row_hash(entry: JsonValue) -> RowHash:
    found = RowHash.of_digest(entry["rows"].integer(), entry["hash"].string())
    if found is None:
        raise entry["hash"].fail("the hash of delivered rows, 32 hexadecimal characters")
    return found


def _skipped_rows(skipped: JsonValue, tree: FileTree) -> tuple[SavedRows, Windows, bool]:
    partial_shards = parse_partial_shards(skipped["in_progress"], tree)
    rows = SavedRows((), parse_rising_numbers(skipped["completed_rows"], tree.dataset_rows), partial_shards)
    return rows, parse_steps(skipped["steps"]), skipped["restores"].boolean()


def _settings(state: JsonValue, plan: JsonValue) -> dict[str, Any]:
    num_workers = state["_num_workers"].integer()
    if num_workers > MOST_WORKERS:
        raise state["_num_workers"].fail(f"at most {MOST_WORKERS} workers")
    num_ranks, rank = state["num_ranks"].integer(1), state["rank"].integer()
    if rank >= num_ranks:
        raise state["rank"].fail(f"less than the number of ranks, {num_ranks}")
    settings = {
        "num_workers": num_workers,
        "num_ranks": num_ranks,
        "rank": rank,
        "shuffle_seed": state["_shuffle_seed"].integer(None),
        "shuffle": plan["shuffle"].boolean(),
        "shuffle_buffer_size": plan["shuffle_buffer_size"].optional_integer(1),
        "split_bytes": plan["split_bytes"].integer(1),
        "split_rows": plan["split_rows"].optional_integer(1),
        "rows": plan["rows"].integer(),
        "shuffle_interleave": plan["shuffle_interleave"].integer(1),
        "uneven_ranks": plan["uneven_ranks"].choice(UNEVEN_RANKS),
        "virtual_ranks": plan["virtual_ranks"].optional_integer(1),
        "virtual_workers": plan["virtual_workers"].optional_integer(1),
        "global_batch_size": plan["global_batch_size"].optional_integer(1),
        "format": plan["format"].string(),
        "format_options": plan["format_options"].optional_string(),
        "snapshot_id": plan["snapshot_id"].optional_integer(),
        "version": plan["version"].optional_integer(),
        "split_strategy": plan["split_strategy"].optional_string(),
        "packing": None if plan["packing"].missing else plan["packing"].optional_string(),
        "filters": plan["filter"].optional_string(),
        "plan_algorithm": state["plan_algorithm"].integer(),
        "unit": "rows" if plan["unit"].missing else plan["unit"].string(),
        "transform_id": None if plan["transform_id"].missing else plan["transform_id"].optional_string(),
    }
    binding = plan["filter_binding"]
    # Earlier releases did not record it. Then the filter alone is compared.
    return settings if binding.missing else settings | {"filter_binding": binding.optional_string()}
