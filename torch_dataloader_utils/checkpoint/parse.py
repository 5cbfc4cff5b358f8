"""A state from outside to frozen values. Pure.

Every value is checked before anything uses it: a damaged state raises a ``ValueError`` that names the wrong value,
never a ``KeyError`` further on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from fractions import Fraction
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple, TypeVar

from torch_dataloader_utils.checkpoint.checksum import checksum_of, part_digest
from torch_dataloader_utils.checkpoint.json_value import JsonValue
from torch_dataloader_utils.checkpoint.mixture_run import SourcePosition, parse_fraction
from torch_dataloader_utils.checkpoint.parse_skips import parse_skips, parse_steps
from torch_dataloader_utils.checkpoint.saved_exclusions import parse_delivered, parse_exclusions
from torch_dataloader_utils.checkpoint.saved_state import (
    BINDING,
    STATE_VERSION,
    SavedBaseline,
    SavedFile,
    SavedMixture,
    SavedRows,
    SavedShard,
    SavedSource,
    SavedState,
)
from torch_dataloader_utils.errors import cut, shown
from torch_dataloader_utils.planning.manifest import Split, root_prefix
from torch_dataloader_utils.planning.plan import TO_THE_END, UNEVEN_RANKS
from torch_dataloader_utils.planning.row_hash import RankHashes, RowHash
from torch_dataloader_utils.planning.row_ranges import RowRange, Windows, first_overlap, known_size_of, size_of

T = TypeVar("T")

MOST_WORKERS = 10_000
"""More workers than any machine runs. A larger number is damage, and planning for it would take hours."""

MOST_PASSES = 1_000_000
"""How many passes of a source an epoch may reach: they are named one by one."""

MOST_EPOCHS = 2**63 - 1
"""Copies of a dataset in other processes learn the epoch as an integer of 64 bits."""

PUBLISHED_KEYS = {"epoch", "_num_workers", "_shuffle_seed", "completed_shards"}
"""All that a state of the other package has: torch-dataloader-utils 0.2.0, which PyPI has under this name."""

FILE_REQUIRED = ("path", "size", "digest")

FILE_OPTIONAL = ("etag", "modified", "rows")
"""What a file's entry holds, in order, after what it must hold."""


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
    files, rows_of_files = shared.parsed("files", (listed.value,), partial(_listed_files, listed))
    is_open_ended = settings["unit"] != "rows" and state["mixture"].missing
    tree = _Tree(root, rows_of_files, is_open_ended)
    rows = _rows(tree, settings["rows"], state)
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
            partial(_baseline, state["base"], tree, settings["rows"]),
        ),
        plan_digest=None if state["plan_digest"].missing else state["plan_digest"].optional_string(),
        filter_bindings=_filter_bindings(plan["filter_bindings"], files),
        skips=None
        if state["skipped"].missing
        else parse_skips(state["skipped"], partial(_rows, tree, settings["rows"])),
        excluded=excluded,
        excluded_delivered=parse_delivered(state["excluded"], excluded, epoch, settings["rows"]),
        hashes=None if state["delivered_hash"].missing else _hashes(state["delivered_hash"]),
        batch_size=None if state["batch_size"].missing else state["batch_size"].optional_integer(1),
        drop_last=None if state["drop_last"].missing or state["drop_last"].is_null else state["drop_last"].boolean(),
        mixture=None if state["mixture"].missing else _mixture(state["mixture"], tree, settings["rows"]),
    )
    _require_checksum(state, shared)  # last: an error that names a wrong value says more
    return saved


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


def _baseline(base: JsonValue, tree: _Tree, dataset_rows: int) -> SavedBaseline | None:
    if base.is_null:
        return None
    return SavedBaseline(
        batches_delivered=base["batches_delivered"].integer(),
        completed_rows=_rising_numbers(base["completed_rows"], dataset_rows),
        in_progress=_partial_shards(base["in_progress"], tree, dataset_rows),
        left_out=tuple(path.string() for path in base["left_out"].items()),
        skipped=None if base["skipped"].missing else _skipped_rows(base["skipped"], tree, dataset_rows),
        hashes=tuple(_hashes(load) for load in base["delivered_hash"].optional_items()),
        gone=0 if base["gone"].missing else base["gone"].integer(),
    )


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


def _skipped_rows(skipped: JsonValue, tree: _Tree, dataset_rows: int) -> tuple[SavedRows, Windows, bool]:
    partial_shards = _partial_shards(skipped["in_progress"], tree, dataset_rows)
    rows = SavedRows((), _rising_numbers(skipped["completed_rows"], dataset_rows), partial_shards)
    return rows, parse_steps(skipped["steps"]), skipped["restores"].boolean()


def _rows(tree: _Tree, dataset_rows: int, rows: JsonValue) -> SavedRows:
    completed = tuple(SavedShard(_splits(shard, tree)) for shard in rows["completed_shards"].items())
    in_progress = _partial_shards(rows["in_progress"], tree, dataset_rows, completed)
    completed_rows = _rising_numbers(rows["completed_rows"], dataset_rows)
    if completed and completed_rows:
        raise rows["completed_rows"].fail("an empty list together with completed_shards")
    return SavedRows(completed, completed_rows, in_progress)


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


def _filter_bindings(bindings: JsonValue, files: tuple[SavedFile, ...] | None) -> str | None:
    if bindings.missing or bindings.is_null:
        return None
    if len(bindings.string()) != BINDING * len(files or ()):
        raise bindings.fail(f"{BINDING} characters for each of the files")
    return bindings.string()


def _mixture(mixture: JsonValue, tree: _Tree, dataset_rows: int) -> SavedMixture:
    sources = tuple(map(_source, mixture["sources"].items()))
    if not sources or len({source.name for source in sources}) < len(sources):
        raise mixture["sources"].fail("sources, each name once")
    carried, earlier = (_rows_by_number(mixture[name], tree, dataset_rows) for name in ("carried", "earlier"))
    own = mixture["rows_of_epoch"]
    rows = mixture["rows_per_epoch"].integer(), None if own.missing else own.integer()
    schedule = mixture["schedule"]
    shares = None if schedule.missing else tuple(_section(section, len(sources)) for section in schedule.items())
    announced = mixture["next_weights"]
    next_weights = None if announced.missing else _shares(announced, len(sources))
    if shares and not (shares[0][0] == 0 and all(one < other for (one, _), (other, _) in pairwise(shares))):
        raise schedule.fail("rising rows, from 0 on")
    return SavedMixture(sources, *rows, mixture["rows_before"].integer(), shares, carried, earlier, next_weights)


def _section(section: JsonValue, sources: int) -> tuple[int, tuple[Fraction, ...]]:
    parts = section.items()
    if len(parts) != len(("row", "shares")):
        raise section.fail("a row, and the shares of the sources from there on")
    return parts[0].integer(), _shares(parts[1], sources)


def _shares(shares: JsonValue, sources: int) -> tuple[Fraction, ...]:
    parts = tuple(map(parse_fraction, shares.items()))
    if len(parts) != sources or sum(parts) != 1:
        raise shares.fail("the share of each source, which add up to 1")
    return parts


def _rows_by_number(rows: JsonValue, tree: _Tree, dataset_rows: int) -> SavedRows:
    completed = _rising_numbers(rows["completed_rows"], dataset_rows)
    return SavedRows((), completed, _partial_shards(rows["in_progress"], tree, dataset_rows))


def _changed_pass(entry: JsonValue) -> tuple[int, tuple[str, ...]]:
    parts = entry.items()
    if len(parts) != len(("pass", "files")):
        raise entry.fail("a pass and the files that are left out of it")
    return parts[0].integer(), tuple(path.string() for path in parts[1].items())


def _buffer(entry: JsonValue) -> tuple[int, int | None]:
    """Return for how many passes a buffer is recorded, and its rows. Earlier releases recorded each pass alone."""
    if not isinstance(entry.value, list):
        return 1, entry.optional_integer(1)
    parts = entry.items()
    if len(parts) != len(("passes", "rows")):
        raise entry.fail("a number of passes and the rows of their buffer")
    return parts[0].integer(1), parts[1].optional_integer(1)


def _source(source: JsonValue) -> SavedSource:
    files = None if source["files"].is_null else _files(source["files"])
    position = source["position"].items()
    buffers = tuple(map(_buffer, source["buffers"].items()))
    if len(position) != len(("pass", "row")) or not buffers:
        raise source["position"].fail("a pass and a row of it, with the buffer of each pass in buffers")
    if sum(passes for passes, _ in buffers) > MOST_PASSES:
        raise source["buffers"].fail(f"at most {MOST_PASSES} passes")
    return SavedSource(
        name=source["name"].string(),
        settings={
            "format": source["format"].string(),
            "format_options": source["format_options"].optional_string(),
            "snapshot_id": source["snapshot_id"].optional_integer(),
            "version": source["version"].optional_integer(),
            "filters": source["filters"].optional_string(),
            "filter_binding": source["filter_binding"].optional_string(),
            "rows": source["rows"].integer(),
            "transform_id": None if source["transform_id"].missing else source["transform_id"].optional_string(),
        },
        weight=parse_fraction(source["weight"]),
        position=SourcePosition(
            position[0].integer(), position[1].integer(), buffers, tuple(map(_changed_pass, source["changed"].items()))
        ),
        fingerprint=source["fingerprint"].string(),
        root=source["root"].string(),
        files=files,
        filter_bindings=_filter_bindings(source["filter_bindings"], files),
    )


def _listed_files(table: JsonValue) -> tuple[tuple[SavedFile, ...] | None, dict[str, int | None]]:
    """Return the files, None if they are not listed, and the rows of each by its path."""
    files = None if table.is_null else _files(table)
    return files, {file.path: file.rows for file in files or ()}


def _files(table: JsonValue) -> tuple[SavedFile, ...]:
    files = []
    for entry in table.items():
        values = entry.items()
        if not len(FILE_REQUIRED) <= len(values) <= len(FILE_REQUIRED) + len(FILE_OPTIONAL):
            raise entry.fail(f"a list of {', '.join(FILE_REQUIRED)} and perhaps {', '.join(FILE_OPTIONAL)}")
        path, size, digest, *extra = values
        etag, modified, rows = [*extra, *[JsonValue(None, "")] * len(FILE_OPTIONAL)][: len(FILE_OPTIONAL)]
        seconds = None if modified.is_null else modified.number()
        file = path.string(), size.integer(), digest.string(), etag.optional_string(), seconds, rows.optional_integer()
        files.append(SavedFile(*file))
    if len({file.path for file in files}) != len(files):
        raise table.fail("each path once")
    return tuple(files)


class _Tree(NamedTuple):
    """The root directory of a state's files, and the rows of each listed file by relative path.

    `is_open_ended` says that only reading tells how many rows shards deliver.
    """

    root: str
    rows: Mapping[str, int | None]
    is_open_ended: bool


def _splits(shard: JsonValue, tree: _Tree) -> tuple[Split, ...]:
    splits = tuple(_split(split, tree) for split in shard["splits"].items())
    if not splits:
        raise shard["splits"].fail("at least one split")
    return splits


def _split(split: JsonValue, tree: _Tree) -> Split:
    path = split["path"].string()
    prefix = root_prefix(tree.root)
    if not path.startswith(prefix):
        raise split["path"].fail(f"a path under the root {shown(tree.root)}")
    path = path.removeprefix(prefix)
    if not split["row_offset"].is_null:
        return Split(path, split["row_offset"].integer(), split["row_length"].integer(1))
    if not split["row_length"].is_null:
        raise split["row_length"].fail("None, as row_offset is None")
    if not split["byte_offset"].missing:
        return Split(path, split["byte_offset"].integer(), split["byte_length"].integer(1))
    whole = tree.rows.get(path)
    if not whole:
        raise split["path"].fail("a file that `files` lists with what it holds, or a byte_offset with it")
    return Split(path, 0, whole)


def _partial_shards(
    in_progress: JsonValue, tree: _Tree, dataset_rows: int, completed: Sequence[SavedShard] = ()
) -> tuple[SavedShard, ...]:
    """Return shards in progress, or raise if a row is in two of them or completed."""
    shards = tuple(_partial_shard(shard, tree, dataset_rows) for shard in in_progress.items())
    counted = [shard for shard in shards if not shard.repeats]
    repeated = [shard for shard in shards if shard.repeats]  # these rows may be in a shard that counts as well
    for apart in ((*completed, *counted), repeated):
        _refuse_overlap(RowRange("the dataset", *pair) for shard in apart for pair in _pairs(shard.rows))
        _refuse_overlap(RowRange.of(split) for shard in apart for split in shard.splits)
    return shards


def _partial_shard(shard: JsonValue, tree: _Tree, dataset_rows: int) -> SavedShard:
    rows = _row_numbers(shard["rows"], dataset_rows)
    if rows and shard["splits"].items():
        raise shard["splits"].fail("an empty list together with rows")
    splits = () if rows else _splits(shard, tree)
    missing = tuple(index.integer() for index in shard["absent"].optional_items())
    if any(index >= len(splits) for index in missing) or len(set(missing)) < len(missing):
        raise shard["absent"].fail("indices of splits")
    most = sum(split.row_length for split in splits) + size_of(_pairs(rows))
    rounds = 1 if shard["rounds"].missing else shard["rounds"].integer(1)
    if rounds > most:
        raise shard["rounds"].fail("at most one for each row of the shard")
    return SavedShard(
        splits=splits,
        rows=rows,
        windows=_windows(shard, None if tree.is_open_ended else most - sum(splits[i].row_length for i in missing)),
        rounds=rounds,
        missing=missing,
        repeats=not shard["repeats"].missing and shard["repeats"].boolean(),
    )


def _windows(shard: JsonValue, most: int | None) -> Windows:
    """Return the delivered windows of a shard of at most so many rows; without `windows` its first rows.

    None for a shard of which only reading tells how many it delivers. Then a window may end with the shard.
    """
    delivered = shard["rows_delivered"].integer()
    windows = tuple(_window(window, may_be_open=most is None) for window in shard["windows"].optional_items())
    if shard["windows"].missing:
        windows = ((0, delivered),) if delivered else ()
    if any(stop >= start for (_, stop), (start, _) in pairwise(windows)):
        raise shard["windows"].fail("rising windows of which no two touch")
    if known_size_of(windows) != delivered:
        raise shard["rows_delivered"].fail("the number of rows in the windows")
    if windows and windows[-1][1] > (TO_THE_END if most is None else most):
        raise shard["rows_delivered"].fail("no more rows than the shard has")
    return windows


def _window(window: JsonValue, *, may_be_open: bool) -> tuple[int, int]:
    bounds = window.items()
    if len(bounds) != len(("start", "stop")):
        raise window.fail("start and stop of a window")
    start = bounds[0].integer()
    stop = TO_THE_END if may_be_open and bounds[1].is_null else bounds[1].integer()
    if start >= stop:
        raise window.fail("start and stop of a window")
    return start, stop


def _pairs(rows: Sequence[int]) -> Iterator[tuple[int, int]]:
    return zip(rows[::2], rows[1::2], strict=True)


def _refuse_overlap(ranges: Iterable[RowRange]) -> None:
    overlap = first_overlap(ranges)
    if overlap is not None:
        path, start, *_ = overlap[1]
        msg = f"not a state of this package: it records rows of {cut(path)} twice, from {shown(start)} on; two states "
        raise ValueError(msg + "were mixed up, or a state was edited")


def _rising_numbers(numbers: JsonValue, dataset_rows: int) -> tuple[int, ...]:
    rows = _row_numbers(numbers, dataset_rows)
    if any(row >= following for row, following in pairwise(rows)):
        raise numbers.fail("rising row numbers")
    return rows


def _row_numbers(numbers: JsonValue, dataset_rows: int) -> tuple[int, ...]:
    rows = tuple(number.integer() for number in numbers.optional_items())
    if len(rows) % 2 or not all(start < stop <= dataset_rows for start, stop in _pairs(rows)):
        raise numbers.fail("pairs of row numbers, start before stop, none above the dataset's number of rows")
    return rows
