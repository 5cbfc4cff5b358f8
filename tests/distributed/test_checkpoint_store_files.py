"""A store of checkpoints: what is kept and deleted, what is refused by name, and what an asynchronous save holds."""

from __future__ import annotations

import json
import math
import resource
import threading
import traceback
import warnings
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
import torch.distributed.checkpoint as dcp
from conftest import SECRET_KEY
from fsspec.implementations.memory import MemoryFileSystem
from hypothesis import given
from hypothesis import strategies as st
from jobs.ranks import run_ranks
from support import all_rows_of, open_loader, rows_of, write_dataset

from torch_dataloader_utils import CheckpointMismatchError, CheckpointStore, CheckpointStoreError, StoredCheckpoint
from torch_dataloader_utils.distributed.dcp_storage import _FsspecFiles, writer_of
from torch_dataloader_utils.distributed.store import _IN_USE
from torch_dataloader_utils.distributed.store_files import Best, _is_cut, _parse, expired

pytestmark = pytest.mark.usefixtures("leaves_nothing_behind")


@pytest.fixture(scope="module", params=["disk", "s3"])
def storage(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, Any]]:
    """A URL, and the options of its storage."""
    if request.param == "disk":
        return f"{tmp_path_factory.mktemp('place')}", {}
    s3 = request.getfixturevalue("s3")
    return f"s3://{s3.new_bucket()}/runs", s3.storage_options()


def cases_on_storages(names: str, cases: dict[str, tuple[Any, ...]]) -> pytest.MarkDecorator:
    """Parametrize a test with cases that differ in names, contents or parts: all on disk, and the first one on S3.

    The others on S3 are for `make soak`.
    """
    first = next(iter(cases))
    params = [
        pytest.param(
            storage,
            *values,
            id=f"{storage}-{case}",
            marks=[pytest.mark.soak] if storage == "s3" and case != first else [],
        )
        for storage in ("disk", "s3")
        for case, values in cases.items()
    ]
    return pytest.mark.parametrize(f"storage, {names}", params, indirect=["storage"])


class Place:
    """A directory of its own on a storage, seen through fsspec."""

    def __init__(self, url: str, options: dict[str, Any]) -> None:
        self.url, self.options = url, options
        self.fs, self.root = fsspec.core.url_to_fs(url, **options)

    def open(self, **settings: Any) -> CheckpointStore:
        return CheckpointStore(self.url, storage_options=self.options, **settings)

    def directories(self) -> list[str]:
        self.fs.invalidate_cache()
        return sorted({path[len(self.root) + 1 :].split("/")[0] for path in self.fs.find(self.root)})

    def steps(self) -> list[int]:
        return [int(name.split("-")[1]) for name in self.directories() if name.startswith("step-")]

    def path(self, checkpoint: StoredCheckpoint | None, file: str) -> str:
        assert checkpoint is not None
        return f"{self.root}/{checkpoint.name}/{file}"

    def write(self, path: str, content: bytes) -> None:
        self.fs.makedirs(path.rpartition("/")[0], exist_ok=True)
        self.fs.pipe_file(path, content)
        self.fs.invalidate_cache()


@pytest.fixture
def place(storage: tuple[str, dict[str, Any]], request: pytest.FixtureRequest) -> Place:
    name = "".join(letter if letter.isalnum() else "-" for letter in request.node.name)
    return Place(f"{storage[0]}/{name}", storage[1])


@pytest.fixture
def disk(tmp_path: Path) -> Place:
    return Place(f"{tmp_path}/run", {})


def layer(value: float = 0.0) -> torch.nn.Linear:
    model = torch.nn.Linear(2, 2)
    torch.nn.init.constant_(model.weight, value)
    return model


class Counts:
    """An object with a state."""

    def __init__(self, values: dict[str, int]) -> None:
        self.values = values

    def state_dict(self) -> dict[str, int]:
        return self.values

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.values = state


# Kept and deleted ---------------------------------------------------------------------------------------------------


def test_the_last_and_the_best_are_kept_and_nothing_that_the_store_did_not_write_is_deleted(place):
    foreign = ["step-100/model.pt", "notes.txt", "step-0000000001-save-000001/model.pt", "other/.metadata"]
    for path in foreign:
        place.write(f"{place.root}/{path}", b"mine")
    store = place.open(keep_last=2, keep_best=("loss", "min", 2))
    for step, loss in enumerate([5.0, 1.0, 3.0, math.nan, 9.0, 8.0, 7.0]):
        store.save(10 * step, model=layer(step), metrics={"loss": loss})
    assert [store.latest().step, store.best().step] == [60, 10]
    assert [found.step for found in place.open().files.complete()] == [10, 20, 50, 60]
    for path in foreign:
        assert place.fs.cat_file(f"{place.root}/{path}") == b"mine"
    model = layer()
    assert place.open().restore(model=model, step=20).metrics == {"loss": 3.0}
    assert model.weight.tolist() == [[2.0, 2.0], [2.0, 2.0]]


@cases_on_storages("name", {"brackets": ("layers=[1,2]",), "star": ("a*b",), "question mark": ("a?b",)})
def test_a_directory_named_like_a_pattern_is_a_store_as_any_other(place, name):
    odd = Place(f"{place.url}/{name}", place.options)
    store = odd.open(keep_last=2)
    for step in range(4):
        store.save(step, model=layer())
    assert odd.steps() == [2, 3]
    assert odd.open().restore(model=layer()).step == 3


class Renaming(MemoryFileSystem):
    """A filesystem that renames by itself and copies nothing, as those of SFTP do."""

    cachable = False

    def cp_file(self, path1: str, path2: str, **kwargs: Any) -> None:
        raise NotImplementedError

    def mv(self, path1: str, path2: str, **kwargs: Any) -> None:  # noqa: ARG002
        self.store[path2] = self.store.pop(path1)


def test_a_filesystem_that_cannot_copy_renames_by_itself_a_file_in_a_directory_named_like_a_pattern():
    files = Renaming()
    files.pipe_file("/renaming/a[1]/new", b"content")
    _FsspecFiles(files).rename("/renaming/a[1]/new", "/renaming/a[1]/old")
    assert files.find("/renaming") == ["/renaming/a[1]/old"]
    files.rm_file("/renaming/a[1]/old")


def test_what_unfinished_saves_left_is_deleted_before_another_writes(place):
    store = place.open()
    half = store.save(1, model=layer())
    place.fs.rm_file(place.path(half, "checkpoint.json"))

    class Late:
        def state_dict(self) -> dict[str, Any]:
            assert place.steps() == []
            return {"value": 1}

        def load_state_dict(self, state: Any) -> None:
            raise AssertionError(state)

    place.open().save(2, late=Late())
    assert place.steps() == [2]


@cases_on_storages("file", {"a file": ("tokenizer.json",), "a directory": ("tokenizer/1.txt",)})
def test_what_someone_put_into_a_checkpoint_stays_when_the_checkpoint_goes(place, file):
    store = place.open(keep_last=1)
    first = store.save(1, model=layer())
    place.write(place.path(first, file), b"mine")
    store.save(2, model=layer())
    place.fs.invalidate_cache()
    assert place.fs.find(f"{place.root}/{first.name}") == [place.path(first, file)]
    assert store.save(3, model=layer()).step == 3
    assert place.fs.exists(place.path(first, file))


def test_no_process_answers_with_a_checkpoint_that_another_has_deleted(disk):
    keeps = {"keep_last": 1, "keep_best": ("loss", "min", 1)}
    store, reader = disk.open(**keeps), disk.open(**keeps)
    first = store.save(1, model=layer(), metrics={"loss": 5.0})
    disk.write(disk.path(first, "notes.txt"), b"mine")  # keeps the directory
    assert (reader.latest().step, reader.best().step) == (1, 1)
    store.save(1, model=layer(), metrics={"loss": 7.0})
    assert (reader.latest().metrics, reader.best().metrics) == ({"loss": 7.0}, {"loss": 7.0})
    for step, loss in ((2, 1.0), (3, 9.0)):
        store.save(step, model=layer(), metrics={"loss": loss})
    assert (reader.latest().step, reader.best().step) == (3, 2)
    with pytest.raises(CheckpointStoreError, match="is incomplete: it has no whole checkpoint"):
        reader.restore(model=layer(), step=1)


@pytest.mark.parametrize("is_listed", [True, False], ids=["whose save had not ended", "that was not listed"])
@pytest.mark.parametrize("name", ["latest", "best"])
def test_the_checkpoint_is_found_for_which_another_process_deletes_those_that_are_looked_at(
    disk, tmp_path, monkeypatch, name, is_listed
):
    store = disk.open(keep_best=("loss", "min", 1))
    old = store.save(1, model=layer(), metrics={"loss": 2.0})
    new = store.save(2, model=layer(), metrics={"loss": 1.0})
    disk.write(disk.path(old, "notes.txt"), b"mine")  # keeps the directory
    place = Path(disk.path(new, "checkpoint.json")) if is_listed else Path(disk.root, new.name)
    hidden = place.rename(tmp_path / "hidden")

    def end_save():
        if hidden.exists():
            hidden.rename(place)
            store.files.delete(old.name)

    reader = disk.open(keep_best=("loss", "min", 1))
    marker_of = reader.files._marker

    def marker_at_that_moment(name):
        if not is_listed:
            end_save()
        marker = marker_of(name)
        end_save()
        return marker

    monkeypatch.setattr(reader.files, "_marker", marker_at_that_moment)
    assert getattr(reader, name)().step == 2


def test_the_checkpoint_that_a_training_began_with_is_not_deleted(place):
    place.open().save(1, model=layer())
    place.open().restore(model=layer())
    store = place.open(keep_last=1)
    for step in (2, 3):
        store.save(step, model=layer())
    assert place.steps() == [1, 3]


class Slow:
    """A part that is written only when it may be."""

    def __init__(self) -> None:
        self.may_be = threading.Event()

    def __deepcopy__(self, _: Any) -> Slow:
        return self

    def __reduce__(self) -> Any:
        assert self.may_be.wait(60)
        return dict, ()

    def state_dict(self) -> dict[str, Any]:
        return {"slow": self}

    def load_state_dict(self, state: Any) -> None:
        raise AssertionError(state)


def test_a_save_in_flight_is_not_visible_and_not_deleted_by_another_store_of_the_process(disk):
    slow = Slow()
    saving = disk.open().save(1, slow=slow, async_=True)
    other = disk.open(keep_last=1)
    other.save(2, model=layer())
    assert not saving.done()
    assert other.latest().step == 2
    slow.may_be.set()
    assert saving.result().step == 1
    assert disk.steps() == [1, 2]


def test_a_later_save_of_a_step_replaces_the_earlier_one_and_is_the_latest(disk):
    store = disk.open(keep_last=None)
    for step, value in ((1, 1.0), (2, 2.0), (3, 3.0)):
        store.save(step, model=layer(value))
    store.restore(model=layer(), step=1)
    store.save(2, model=layer(20.0))
    model = layer()
    assert disk.open().restore(model=model).step == 2
    assert model.weight[0, 0] == 20
    assert disk.steps() == [1, 2, 3]


@pytest.mark.parametrize(
    ("given_metrics", "error", "message"),
    [
        ({"losss": 1.0}, ValueError, "did you mean 'losss'"),
        ({"loss": "low"}, TypeError, r"metrics\['loss'\] is 'low'"),
    ],
    ids=["another name", "a text"],
)
def test_metrics_without_the_one_of_keep_best_are_an_error_and_nothing_is_saved(disk, given_metrics, error, message):
    store = disk.open(keep_best=("loss", "min", 1))
    with pytest.raises(error, match=message):
        store.save(1, model=layer(), metrics=given_metrics)
    assert store.latest() is None


def test_a_checkpoint_without_metrics_or_with_nan_is_never_the_best(disk):
    store = disk.open(keep_best=("loss", "max", 1))
    store.save(1, model=layer())
    store.save(2, model=layer(), metrics={"loss": math.nan})
    assert store.best() is None
    store.save(3, model=layer(), metrics={"loss": torch.tensor(-math.inf)})
    assert store.best().step == 3
    assert disk.open(keep_best=("loss", "min", 1)).best().step == 3


@given(
    st.lists(st.tuples(st.integers(0, 5), st.sampled_from([0.0, 1.0, 2.0, math.nan])), max_size=12),
    st.one_of(st.none(), st.integers(1, 4)),
    st.integers(0, 3),
    st.sets(st.integers(1, 12)),
)
def test_retention_keeps_what_it_has_to_and_deletes_all_else(saves, keep_last, best_count, in_use):
    checkpoints = [
        StoredCheckpoint(step, {"loss": loss}, (), f"/run/{number}", number, {}, "")
        for number, (step, loss) in enumerate(saves, 1)
    ]
    best = Best("loss", "min", best_count) if best_count else None
    kept = [found for found in checkpoints if found not in expired(checkpoints, keep_last, best, set(map(str, in_use)))]
    current = [one for one in checkpoints if all(one.step != later.step for later in checkpoints[one.number :])]
    measured = sorted((one for one in current if one.metrics["loss"] >= 0), key=lambda one: one.metrics["loss"])
    for one in checkpoints:
        is_last = one in (current if keep_last is None else current[-keep_last:])
        losses = [other.metrics["loss"] for other in measured]
        surely_best = one in measured and sum(loss <= one.metrics["loss"] for loss in losses) <= best_count
        never_best = one not in measured or sum(loss < one.metrics["loss"] for loss in losses) >= best_count
        if is_last or surely_best or one.number in in_use:
            assert one in kept
        elif never_best:
            assert one not in kept


# Refused by name ----------------------------------------------------------------------------------------------------


@cases_on_storages("file", {"tensors": ("__0_0.distcp",), "metadata": (".metadata",)})
def test_a_truncated_a_missing_or_a_longer_file_is_refused_by_name(place, file):
    store = place.open()
    store.save(1, model=layer(1.0))
    saved = store.save(2, model=layer(2.0))
    path = place.path(saved, file)
    content = place.fs.cat_file(path)
    for wrong, message in ((content[:-1], "is truncated"), (content + b"x", "changed"), (None, "is missing")):
        place.fs.rm_file(path) if wrong is None else place.write(path, wrong)
        model = layer(7.0)
        with pytest.raises(CheckpointStoreError, match=message) as caught:
            place.open().restore(model=model)
        assert f"{saved.name}/{file}" in str(caught.value)
        assert model.weight[0, 0] == 7
    assert place.open().restore(model=layer(), step=1).step == 1


def test_a_flipped_byte_of_the_metadata_is_refused_by_name(disk):
    saved = disk.open().save(1, model=layer(1.0))
    path = Path(disk.path(saved, ".metadata"))
    content = path.read_bytes()
    path.write_bytes(content.replace(b"weight", b"weighs", 1))
    with pytest.raises(CheckpointStoreError, match=rf"{saved.name}/.metadata is damaged"):
        disk.open().restore(model=layer())


@cases_on_storages("left", {"no marker": (None,), "empty marker": (b"",), "cut marker": (b'{"format": "torch',)})
def test_a_half_written_one_is_not_visible_refused_by_name_and_deleted_by_the_next_save(place, left):
    store = place.open()
    store.save(1, model=layer())
    half = store.save(2, model=layer())
    path = place.path(half, "checkpoint.json")
    place.fs.rm_file(path) if left is None else place.write(path, left)
    later = place.open()
    assert later.latest().step == 1
    with pytest.raises(
        CheckpointStoreError, match=rf"{half.name} is incomplete.*complete checkpoints are of steps \[1\]"
    ):
        later.restore(model=layer(), step=2)
    assert half.name in place.directories()
    later.save(3, model=layer())
    assert place.steps() == [1, 3]


@cases_on_storages(
    "changes, message",
    {
        "foreign": ({"format": "another"}, "is foreign"),
        "of a later release": ({"version": 2}, "has format version 2, and this release reads 1"),
        "edited": ({"metrics": {"loss": 0.0}}, "its checksum is another one"),
    },
)
def test_a_marker_that_the_store_did_not_write_is_refused_by_name_and_stays(place, changes, message):
    store = place.open()
    store.save(1, model=layer())
    saved = store.save(2, model=layer())
    path = place.path(saved, "checkpoint.json")
    place.write(path, json.dumps({**json.loads(place.fs.cat_file(path)), **changes}).encode())
    later = place.open(keep_last=1)
    for call in (later.latest, lambda: later.restore(model=layer()), lambda: later.restore(model=layer(), step=2)):
        with pytest.raises(CheckpointStoreError, match=message) as caught:
            call()
        assert f"{saved.name}/checkpoint.json" in str(caught.value)
    later.save(3, model=layer())
    assert place.steps() == [2, 3]


def test_a_marker_that_is_no_json_any_more_is_refused_by_name_and_stays(disk):
    store = disk.open()
    store.save(1, model=layer())
    saved = store.save(2, model=layer())
    path = Path(disk.path(saved, "checkpoint.json"))
    path.write_bytes(path.read_bytes().replace(b'"step": 2,', b'"step": 2,,'))
    later = disk.open(keep_last=1)
    for call in (later.latest, lambda: later.restore(model=layer()), lambda: later.restore(model=layer(), step=2)):
        with pytest.raises(CheckpointStoreError, match=rf"{saved.name}/checkpoint\.json is damaged: it is no JSON"):
            call()
    later.save(3, model=layer())
    assert disk.steps() == [2, 3]


def test_each_beginning_of_a_marker_is_an_unfinished_save_and_no_flipped_bit_makes_one_of_it(disk):
    # Without letters that may also be capitals, as in numbers and after a backslash: those are the same values.
    metrics = {'"a\\b}': -1.5, "\x85": math.nan, "c": math.inf, "d": 0.25, "e": 1e2, "f": -math.inf}
    saved = disk.open().save(1, model=layer(), metrics=metrics)
    text = Path(disk.path(saved, "checkpoint.json")).read_bytes()
    for whole in (text, b'{"\\u00e9": [-1.5e-07, 1E+30, true, null]}'):
        assert all(_is_cut(whole[:size]) for size in range(len(whole)))
    for place in range(len(text)):
        for bit in range(8):
            damaged = text[:place] + bytes([text[place] ^ 1 << bit]) + text[place + 1 :]
            assert not _is_cut(damaged), damaged
            with pytest.raises(CheckpointStoreError, match=rf"{saved.name}/checkpoint\.json (is|has)"):
                _parse(damaged, saved.name, saved.url)


def test_a_checkpoint_is_no_store(place):
    saved = place.open().save(1, model=layer())
    inside = Place(f"{place.url}/{saved.name}", place.options)
    with pytest.raises(CheckpointStoreError, match="is a checkpoint by itself"):
        inside.open().latest()


@pytest.mark.parametrize("what", ["a file", "a link that leads nowhere"])
def test_what_is_no_directory_is_no_store_that_is_empty(tmp_path, what):
    """A training that takes it for one begins again from nothing."""
    path = tmp_path / "store"
    path.write_text("") if what == "a file" else path.symlink_to(tmp_path / "nowhere")
    store = CheckpointStore(path)
    for call in (store.latest, lambda: store.restore(model=layer()), lambda: store.save(1, model=layer())):
        with pytest.raises(CheckpointStoreError, match=rf"{path} is no directory: a store is the directory above"):
            call()


def test_a_step_that_was_not_saved_is_an_error_that_names_those_that_were(disk):
    store = disk.open()
    store.save(4, model=layer())
    with pytest.raises(
        FileNotFoundError, match=r"no checkpoint of step 5; the complete checkpoints are of steps \[4\]"
    ):
        store.restore(model=layer(), step=5)


def test_nothing_is_restored_where_nothing_was_saved(place):
    assert place.open().latest() is None
    assert place.open().restore(model=layer()) is None


def test_neither_a_save_nor_a_restore_takes_a_bucket_that_does_not_exist_for_an_empty_store(s3):
    options = s3.storage_options()
    options["client_kwargs"]["region_name"] = "eu-west-1"  # in which s3fs can make one
    store = CheckpointStore("s3://a-misspelled-bucket/run", storage_options=options)
    for call in (store.latest, lambda: store.restore(model=layer()), lambda: store.save(1, model=layer())):
        with pytest.raises(FileNotFoundError, match=r"s3://a-misspelled-bucket/run.*bucket does not exist"):
            call()
    assert "a-misspelled-bucket" not in [bucket["Name"] for bucket in s3.client().list_buckets()["Buckets"]]


@pytest.mark.parametrize("size", [1, 3])
def test_a_model_with_fewer_or_more_layers_is_refused(disk, size):
    disk.open().save(1, model=torch.nn.Sequential(layer(), layer()))
    with pytest.raises(CheckpointStoreError, match=r"step-0000000001.*(model\.1\.bias|model\.2\.)"):
        disk.open().restore(model=torch.nn.Sequential(*(layer() for _ in range(size))))


def test_a_part_that_holds_nothing_yet_is_not_passed_over(disk):
    counts = Counts({"seen": 7})
    disk.open().save(1, model=layer(), counts=counts)
    with pytest.raises(CheckpointStoreError, match=r"step-0000000001.*'counts\.seen'.*nothing to load into"):
        disk.open().restore(model=layer(), counts=Counts({}))
    restored = Counts({"seen": 0})
    disk.open().restore(model=layer(), counts=restored)
    assert restored.values == {"seen": 7}


def test_a_part_that_was_not_saved_is_an_error_that_names_those_that_were(disk):
    model = layer()
    disk.open().save(1, model=model)
    with pytest.raises(CheckpointStoreError, match="holds no 'optimizer'; there are model"):
        disk.open().restore(model=model, optimizer=torch.optim.SGD(model.parameters()))


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({}, ValueError, "nothing to save"),
        ({"model": {}}, TypeError, "model is dict"),
        ({"optimizer": torch.optim.SGD([torch.zeros(1)])}, TypeError, "needs its model"),
        ({"loader": [1]}, TypeError, "loader is list"),
        ({"scheduler": 3}, TypeError, "scheduler is int"),
        ({"model": layer(), "step": -1}, ValueError, "step is -1"),
    ],
    ids=["nothing", "no model", "an optimizer alone", "a list", "a number", "a negative step"],
)
def test_wrong_arguments_are_refused(disk, arguments, error, message):
    with pytest.raises(error, match=message):
        disk.open().save(**{"step": 1, **arguments})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"keep_last": 0}, "keep_last is 0"),
        ({"keep_best": "loss"}, "keep_best is 'loss'"),
        ({"keep_best": ("loss", "least", 1)}, "keep_best is"),
        ({"keep_best": ("loss", "min", 0)}, "keep_best is"),
    ],
    ids=["keep none", "a name", "another mode", "no best"],
)
def test_wrong_settings_are_refused(disk, settings, message):
    with pytest.raises(ValueError, match=message):
        disk.open(**settings)


def test_a_file_that_cannot_be_written_further_is_an_error_that_says_so(disk):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, hard))  # as where a disk is full
    try:
        with pytest.raises(CheckpointStoreError, match=r"step-0000000001-save-000001.*: OSError: .*File too large"):
            disk.open().save(1, model=torch.nn.Linear(200, 200))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_errors_of_a_storage_name_the_store_and_hold_no_secret(s3):
    url = f"s3://{s3.new_bucket()}/run"
    store = CheckpointStore(url, storage_options=s3.storage_options())
    model = layer()
    store.save(1, model=model)
    s3.check_credentials(True)
    try:
        for call in (store.latest, lambda: store.save(2, model=model), lambda: store.restore(model=model)):
            with pytest.raises(PermissionError, match=url) as caught:
                call()
            assert SECRET_KEY not in "".join(traceback.format_exception(caught.value))
        writer = writer_of(store.files.writing_fs, store.files.location("new"))
        with (
            pytest.raises(CheckpointStoreError, match=f"{url}/new: rank 0: PermissionError") as caught,
            store._errors("new"),
        ):
            dcp.save({"model": model}, storage_writer=writer)
        assert SECRET_KEY not in "".join(traceback.format_exception(caught.value))
    finally:
        s3.check_credentials(False)
    assert store.latest().step == 1


# What is saved ------------------------------------------------------------------------------------------------------


@cases_on_storages("optimizer_of", {"with a state": (torch.optim.AdamW,), "without a state": (torch.optim.SGD,)})
def test_model_optimizer_scheduler_and_loaders_are_as_they_were_at_the_call(place, tmp_path, optimizer_of):
    write_dataset(tmp_path / "data")

    def fresh() -> dict[str, Any]:
        model = torch.nn.Sequential(layer(0.5), layer(0.5))
        model[0].bias.requires_grad_(requires_grad=False)
        groups = [{"params": model[0].parameters(), "lr": 0.1}, {"params": model[1].parameters(), "lr": 0.01}]
        optimizer = optimizer_of(groups)
        parts = {"model": model, "optimizer": optimizer, "scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 2)}
        return {**parts, "loader": open_loader(tmp_path / "data")[0], "validation": open_loader(tmp_path / "data")[0]}

    def step(parts: dict[str, Any]) -> list[int]:
        parts["model"](torch.ones(4, 2)).sum().backward()
        parts["optimizer"].step()
        parts["optimizer"].zero_grad()  # with gradients, old releases of torch save no optimizer without a state
        parts["scheduler"].step()
        return rows_of(next(parts["batches"]))

    trained = fresh()
    trained["batches"] = iter(trained["loader"])
    for _ in range(3):
        step(trained)
    parts = {name: value for name, value in trained.items() if name != "batches"}
    store = place.open()
    saving = store.save(3, async_=True, **parts)
    went_on = [step(trained) for _ in range(4)]
    assert saving.result() == store.wait() == place.open().latest()
    resumed = fresh()
    assert place.open().restore(**resumed) == saving.result()
    resumed["batches"] = iter(resumed["loader"])
    assert [step(resumed) for _ in range(4)] == went_on
    for name in ("model", "optimizer", "scheduler"):
        states = [parts[name].state_dict() for parts in (resumed, trained)]
        for state in states:  # the empty states of parameters come and go
            state["state"] = {number: values for number, values in state.get("state", {}).items() if values}
        assert str(states[0]) == str(states[1])
    assert len(all_rows_of(resumed["validation"])) == 443


class Unwritable:
    """A value that can be copied, and not be written."""

    def __deepcopy__(self, _: Any) -> Unwritable:
        return self

    def __reduce__(self) -> Any:
        raise ValueError("it cannot be written")


class Fails:
    """A part whose state cannot be written."""

    def state_dict(self) -> dict[str, Any]:
        return {"value": Unwritable()}

    def load_state_dict(self, state: Any) -> None:
        raise AssertionError(state)


@cases_on_storages("wait", {"by waiting": (True,), "by the next save": (False,)})
def test_an_error_of_an_asynchronous_save_is_raised_once_and_leaves_the_checkpoints_before_it(place, wait):
    store = place.open()
    store.save(1, model=layer(1.0))
    saving = store.save(2, model=layer(2.0), other=Fails(), async_=True)
    with pytest.raises(CheckpointStoreError, match=r"step-0000000002.*it cannot be written"):
        store.wait() if wait else store.save(3, model=layer(3.0))
    assert isinstance(saving.exception(), CheckpointStoreError)
    assert store.wait() is None
    assert place.open().latest().step == 1
    store.save(3, model=layer(3.0))
    assert place.steps() == [1, 3]


class Uncopyable:
    """A value that cannot be copied into the memory of which an asynchronous save writes."""

    def __deepcopy__(self, _: Any) -> Uncopyable:
        raise ValueError("it cannot be copied")


class FailsAtOnce(Fails):
    """A part whose state cannot be copied."""

    def state_dict(self) -> dict[str, Any]:
        return {"value": Uncopyable()}


def test_an_asynchronous_save_that_fails_before_it_writes_keeps_no_name_in_use(disk):
    store, before = disk.open(), set(_IN_USE)
    with pytest.raises(CheckpointStoreError, match="it cannot be copied"):
        store.save(1, model=layer(1.0), other=FailsAtOnce(), async_=True)
    assert before == _IN_USE
    assert store.wait() is None
    assert store.save(1, model=layer(1.0), async_=True).result().step == 1


def test_an_asynchronous_save_of_one_process_warns_of_nothing(disk):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", "TypedStorage is deprecated")  # torch 2.4 says so of its own code
        assert disk.open().save(1, model=layer(1.0), async_=True).result().step == 1


def test_a_loader_of_other_files_is_refused(disk, tmp_path):
    for name, files in (("one", ((30, 10),)), ("other", ((31, 10),))):
        write_dataset(tmp_path / name, files)
    disk.open().save(1, loader=open_loader(tmp_path / "one")[0])
    with pytest.raises(CheckpointMismatchError):
        disk.open().restore(loader=open_loader(tmp_path / "other")[0])


def test_an_error_of_one_rank_is_an_error_of_all(tmp_path):
    run_ranks("store_errors_job.py", 2, {"url": f"{tmp_path}/run"}, tmp_path)
    assert CheckpointStore(f"{tmp_path}/run").latest().step == 2
