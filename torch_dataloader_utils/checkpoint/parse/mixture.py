"""The sources of a mixture in a state, from outside to frozen values. Pure."""

from __future__ import annotations

from fractions import Fraction
from itertools import pairwise

from torch_dataloader_utils.checkpoint.json_value import JsonValue
from torch_dataloader_utils.checkpoint.mixture_run import SourcePosition, parse_fraction
from torch_dataloader_utils.checkpoint.parse.files import parse_bindings, parse_files
from torch_dataloader_utils.checkpoint.parse.rows import FileTree, parse_rows_by_number
from torch_dataloader_utils.checkpoint.saved_state import SavedMixture, SavedSource

MOST_PASSES = 1_000_000
"""How many passes of a source an epoch may reach: they are named one by one."""


def parse_mixture(mixture: JsonValue, tree: FileTree) -> SavedMixture:
    """Return where the sources stood and their weights, or raise a ValueError that names the wrong value."""
    sources = tuple(map(_source, mixture["sources"].items()))
    if not sources or len({source.name for source in sources}) < len(sources):
        raise mixture["sources"].fail("sources, each name once")
    carried, earlier = (parse_rows_by_number(mixture[name], tree) for name in ("carried", "earlier"))
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
    files = None if source["files"].is_null else parse_files(source["files"])
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
        filter_bindings=parse_bindings(source["filter_bindings"], files),
    )
