"""States and manifests that are damaged anywhere: refused by a documented error in few words, or the same as before."""

from __future__ import annotations

import copy
import io
import json
import math
import random
import time
import tracemalloc
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch
from deltalake import write_deltalake
from support import all_rows_of, open_loader, write_dataset
from text_files import csv_of

from torch_dataloader_utils import DeltaDataset, LostRowsWarning, UnevenRanksWarning, UnreadableFileError
from torch_dataloader_utils.distributed import load_rank_state

STATES = "states: each byte cut, bits flipped, keys missing or extra, huge numbers, deep nesting"
MANIFESTS = "manifests: each byte cut, bits flipped"
MOST_CHARACTERS = 4096
MOST_SECONDS = 5
"""A damaged state is refused in milliseconds of processor time. So much is allowed on a busy machine."""

pytestmark = [
    pytest.mark.filterwarnings(f"ignore::torch_dataloader_utils.{category.__name__}")
    for category in (UnevenRanksWarning, LostRowsWarning)
]

FILES = ((60, 20), (45, 15), (80, 20))
ROWS_SHUFFLED = {"batch_size": 7, "shuffle": True, "shuffle_buffer_size": 30}


@dataclass(frozen=True)
class Kind:
    """A kind of state.

    Attributes:
        open: Opens the loader that saved it.
        state: The state, as JSON gives it.
        strict: Whether it is loaded strictly.
    """

    open: Callable[[], Any]
    state: Any
    strict: bool

    def load(self, loader: Any, state: Any) -> Any:
        """Load a state and return what the loader then says of its progress; None if that was refused."""
        before = loader.state_dict()
        began = time.thread_time()
        try:
            loader.load_state_dict(state, strict=self.strict)
            message = None
        except ValueError as error:
            message = str(error)
        assert time.thread_time() - began < MOST_SECONDS
        if message is None:
            return loader.state_dict()
        assert len(message) < MOST_CHARACTERS
        assert loader.state_dict() == before
        return None


def saved(loader: Any, batches: int) -> Any:
    for _, _ in zip(range(batches), loader, strict=False):
        pass
    return json.loads(json.dumps(loader.state_dict()))


@pytest.fixture(scope="module")
def kinds(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Kind]:
    """Return states of all kinds, in the middle of an epoch."""
    directory: Path = tmp_path_factory.mktemp("states")
    write_dataset(directory / "parquet", FILES)
    (directory / "csv").mkdir()
    for number in range(3):
        (directory / "csv" / f"{number}.csv").write_bytes(csv_of(range(number * 40, number * 40 + 40)))
    for mode in ("error", "append"):
        write_deltalake(directory / "delta", pa.table({"x": list(range(50))}), mode=mode)

    def parquet(**options: Any) -> Callable[[], Any]:
        return lambda: open_loader(directory / "parquet", **{**ROWS_SHUFFLED, **options})[0]

    def text() -> Any:
        return open_loader(directory / "csv", format="csv", row_id_column=None, shuffle=True, split_bytes=300)[0]

    def table() -> Any:
        return DeltaDataset.create_dataloader(directory / "delta", batch_size=7, num_workers=0, shuffle=True)[0]

    grid = {"virtual_ranks": 2, "virtual_workers": 2, "uneven_ranks": "pad", "batch_size": 8}
    kinds = {
        name: Kind(opened, saved(opened(), 5), strict=True)
        for name, opened in {
            "rows shuffled": parquet(),
            "in order, a filter": parquet(shuffle=False, shuffle_buffer_size=None, filters=[("value", ">", 9)]),
            "a virtual topology": parquet(**grid, fingerprint=True),
            "text": text,
            "a table": table,
        }.items()
    }
    hashed = {"fingerprint": True}
    ranks = [saved(parquet(num_ranks=2, rank=rank, **hashed)(), 3) for rank in range(2)]
    kinds["all ranks, elastic"] = Kind(parquet(**hashed), ranks, strict=False)
    continued = parquet(**hashed)()
    continued.load_state_dict(ranks, strict=False)
    kinds["after an elastic load"] = Kind(parquet(**hashed), saved(continued, 3), strict=True)
    return kinds


NAMES = (
    "rows shuffled",
    "in order, a filter",
    "a virtual topology",
    "text",
    "a table",
    "all ranks, elastic",
    "after an elastic load",
)

each_kind = pytest.mark.parametrize("name", NAMES)
lengths = pytest.mark.parametrize("share", [pytest.param(1, marks=pytest.mark.soak), 197], ids=["all", "some"])
"""Which cuts and which bits: every one in the soak, else about one of 200, all over the state."""


class Tried:
    """Tries damaged states of a kind, and counts them."""

    def __init__(self, kind: Kind, outcome: Any) -> None:
        self._kind, self._outcome = kind, outcome
        self._loader = kind.open()
        self._right = kind.load(kind.open(), kind.state)
        assert self._right is not None
        self.refused = self.accepted = 0

    def try_state(self, state: Any) -> None:
        """Try one: it is refused, or loads as the undamaged one does. A checksum lets nothing else through."""
        found = self._kind.load(self._loader, state)
        if found is None:
            self.refused += 1
            return
        self.accepted += 1
        if found != self._right:
            self._outcome.corrupted += 1
        self._loader = self._kind.open()

    def note(self) -> None:
        """Write the counts into the record."""
        self._outcome.case += f": {self.refused} refused, {self.accepted} equal to the original"
        self._outcome.faults = self.refused + self.accepted
        del self._loader  # it has a page of shared memory


# Bytes -------------------------------------------------------------------------------------------------------------


@lengths
@each_kind
def test_json_that_is_cut_or_has_a_flipped_bit_is_refused_or_equal(kinds, record, name, share):
    kind = kinds[name]
    content = json.dumps(kind.state).encode()
    with record(STATES, f"{name}, bits of JSON flipped") as outcome:
        tried = Tried(kind, outcome)
        for bit in range(0, 8 * len(content), share):
            damaged = bytearray(content)
            damaged[bit // 8] ^= 1 << bit % 8
            try:
                state = json.loads(damaged)
            except ValueError:
                continue
            tried.try_state(state)
        assert tried.refused
        tried.note()


@pytest.mark.parametrize("share", [pytest.param(1, marks=pytest.mark.soak), 13], ids=["all", "some"])
def test_a_file_of_a_state_that_is_cut_or_has_a_flipped_bit_is_refused_by_its_name(kinds, record, tmp_path, share):
    kind = kinds["rows shuffled"]
    content = json.dumps(kind.state).encode()
    path = tmp_path / "loader-00000-of-00001.json"
    with record(STATES, "a file of a rank's state, each byte cut") as outcome:
        loader = kind.open()
        before = loader.state_dict()
        for length in range(0, len(content), share):
            path.write_bytes(content[:length])
            with pytest.raises(ValueError, match=path.name):
                load_rank_state(loader, tmp_path)
            outcome.faults += 1
        assert loader.state_dict() == before
        del loader


@lengths
def test_a_state_of_torch_that_is_damaged_is_refused_or_equal(kinds, record, share):
    """Torch raises its own errors for files that it cannot read."""
    kind = kinds["rows shuffled"]
    stored = io.BytesIO()
    torch.save(kind.state, stored)
    content = stored.getvalue()
    with record(STATES, "torch.save, bytes cut and bits flipped") as outcome:
        tried = Tried(kind, outcome)
        flips = [(bit // 8, 1 << bit % 8) for bit in range(0, 8 * len(content), share)]
        for damaged in (*_flipped(content, flips), *(content[:length] for length in range(0, len(content), share))):
            try:
                state = torch.load(io.BytesIO(damaged), weights_only=True)
            except Exception:  # noqa: BLE001, S112 - torch's, of many types
                continue
            tried.try_state(state)
        tried.note()


def _flipped(content: bytes, flips: list[tuple[int, int]]) -> Iterator[bytes]:
    for place, mask in flips:
        damaged = bytearray(content)
        damaged[place] ^= mask
        yield bytes(damaged)


# Values ------------------------------------------------------------------------------------------------------------

DEEP: list[Any] = []
for _ in range(3000):
    DEEP = [DEEP]

WRONG: dict[str, Any] = {
    "nothing": None,
    "a truth": True,
    "a negative number": -1,
    "a huge number": 10**30,
    "a number of too many digits": 10**5000,
    "a fraction": 0.5,
    "no number": math.nan,
    "infinity": -math.inf,
    "a text": "x",
    "a long text": "x" * 10**6,
    "a lone surrogate": "\ud800",
    "a list": [],
    "a long list": [0] * 10**5,
    "a dictionary": {},
    "numbers as keys": {1: 2},
    "deep nesting": DEEP,
    "bytes": b"x",
    "a set": {1},
}


def owners(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of each value, at any depth; of long lists those of the first values."""
    items = value.items() if isinstance(value, dict) else enumerate(value[:3]) if isinstance(value, list) else ()
    for key, inner in items:
        yield (*path, key)
        yield from owners(inner, (*path, key))


def changed(state: Any, path: tuple[Any, ...], change: Callable[[Any, Any], None]) -> Any:
    """Return a copy of a state of which one place was changed."""
    damaged = owner = copy.copy(state)
    for key in path[:-1]:
        owner[key] = copy.copy(owner[key])  # not a deep copy: other places may be nested too deeply for that
        owner = owner[key]
    change(owner, path[-1])
    return damaged


def without_checksums(state: Any) -> Any:
    """Return it as states of earlier releases are."""
    if isinstance(state, list):
        return [without_checksums(one) for one in state]
    return {key: value for key, value in state.items() if key != "checksum"}


@each_kind
def test_values_that_are_missing_or_wrong_are_refused_or_change_nothing(kinds, record, name):
    kind = kinds[name]
    with record(STATES, f"{name}, keys missing and extra, values wrong") as outcome:
        tried = Tried(kind, outcome)
        wrong = list(WRONG.values())
        for number, path in enumerate(owners(kind.state)):
            if path != ("checksum",) and path[-1] != "checksum":
                tried.try_state(changed(kind.state, path, lambda owner, key: owner.__delitem__(key)))
            for value in (wrong[number % len(wrong)], wrong[(7 * number + 3) % len(wrong)]):
                tried.try_state(
                    changed(kind.state, path, lambda owner, key, value=value: owner.__setitem__(key, value))
                )
            tried.try_state(changed(kind.state, path, _with_more))
        assert tried.refused > 50
        tried.note()


def _with_more(owner: Any, key: Any) -> None:
    if isinstance(owner, dict):
        owner["of a framework"] = 1
    else:
        owner.insert(key, copy.deepcopy(owner[key]))


@pytest.mark.soak
@each_kind
def test_states_without_a_checksum_are_refused_by_a_documented_error_or_loaded(kinds, record, seeds, name):
    """Without a checksum a state that is damaged in one digit may be another state. It never fails otherwise."""
    kind = kinds[name]
    plain = without_checksums(kind.state)
    paths = list(owners(plain))
    refused = loaded = 0
    with record(STATES, f"{name}, without a checksum, damaged at random") as outcome:
        for seed in seeds(20_000):
            draw = random.Random(seed)
            state = plain
            for _ in range(draw.randint(1, 3)):
                path = draw.choice(paths)
                value = draw.choice([*WRONG.values(), draw.randrange(200), draw.randrange(-3, 10**12)])
                try:
                    state = changed(state, path, lambda owner, key, value=value: owner.__setitem__(key, value))
                except (AttributeError, KeyError, IndexError, TypeError):  # a change before took the place away
                    continue
            loader = kind.open()
            if kind.load(loader, state) is None:
                refused += 1
            else:
                loaded += 1
                rows = list(all_rows_of(loader)) if "text" not in name and name != "a table" else []
                assert len(rows) == len(set(rows))
            del loader
        outcome.faults = refused + loaded
        outcome.case += f": {refused} refused, {loaded} loaded, each row at most once"


def test_an_epoch_of_more_than_63_bits_changes_nothing(kinds):
    loader = kinds["rows shuffled"].open()
    before = loader.state_dict()
    with pytest.raises(ValueError, match="at most 9223372036854775807"):
        loader.set_epoch(2**63)
    assert loader.state_dict() == before


OTHER_TOPOLOGY = {"many workers", "a virtual topology without end"}
"""What an elastic load may find changed, and does not plan for."""


@pytest.mark.parametrize("strict", [True, False])
def test_memory_is_proportional_to_a_hostile_state(kinds, record, strict):
    kind = kinds["rows shuffled"]
    plain = without_checksums(kind.state)
    plan = plain["plan"]
    hostile = {
        "ranks without end": plain | {"num_ranks": 10**12, "rank": 10**11},
        "a large number of rows": plain | {"plan": plan | {"rows": 10**15}, "completed_shards": [], "in_progress": []},
        "completed rows without end": plain
        | {"plan": plan | {"rows": 10**15}, "completed_rows": [0, 10**15], "completed_shards": [], "in_progress": []},
        "row numbers of a shard without end": plain
        | {
            "plan": plan | {"rows": 10**15},
            "completed_shards": [],
            "in_progress": [{"splits": [], "rows": [0, 10**15], "rows_delivered": 10**14, "rounds": 10**12}],
        },
        "many workers": plain | {"_num_workers": 9999},
        "a virtual topology without end": plain | {"plan": plan | {"virtual_ranks": 10**12, "virtual_workers": 10**12}},
        "an epoch without end": plain | {"epoch": 10**4000},
    }
    with record(STATES, f"hostile numbers, strict={strict}") as outcome:
        for name, state in hostile.items():
            loader = kind.open()
            tracemalloc.start()
            try:
                found = Kind(kind.open, state, strict).load(loader, state)
                peak = tracemalloc.get_traced_memory()[1]
            finally:
                tracemalloc.stop()
            assert peak < 10**7 + 100 * len(str(state)), (name, peak)
            assert found is None or (not strict and name in OTHER_TOPOLOGY), name
            del loader
        outcome.faults = len(hostile)


# Manifests ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("share", [pytest.param(1, marks=pytest.mark.soak), 29], ids=["all", "some"])
def test_a_manifest_that_is_cut_or_has_a_flipped_bit_is_refused(tmp_path, record, share):
    write_dataset(tmp_path / "data")
    manifest = open_loader(tmp_path / "data")[1].dump_manifest()
    flips = [(bit // 8, 1 << bit % 8) for bit in range(0, 8 * len(manifest), share)]
    cuts = (manifest[:length] for length in range(0, len(manifest), share))
    with record(MANIFESTS, "a manifest of four files") as outcome:
        for damaged in (*_flipped(manifest, flips), *cuts, manifest + b"\0", manifest + manifest):
            with pytest.raises((ValueError, UnreadableFileError)) as raised:
                open_loader(tmp_path / "data", manifest=damaged)
            assert len(str(raised.value)) < MOST_CHARACTERS
            outcome.faults += 1
