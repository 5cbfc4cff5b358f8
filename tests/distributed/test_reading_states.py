"""States are read from wherever they were saved, without running what a pickle names and without reading tensors."""

from __future__ import annotations

import json
import pickle
import random
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from support import open_loader, write_dataset

from torch_dataloader_utils import CheckpointStore, CheckpointStoreError, UnreadableFileError
from torch_dataloader_utils.distributed import CheckpointEntry, read_states, save_rank_state
from torch_dataloader_utils.distributed.entries import ALL_RANKS, dump_states

pytestmark = [
    pytest.mark.filterwarnings("ignore::torch_dataloader_utils.UnevenRanksWarning"),
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
]

States = list[dict[str, Any]]


@pytest.fixture(scope="module")
def loaders(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Any]]:
    """The loaders of two ranks in the middle of an epoch, and one that reads alone."""
    data = tmp_path_factory.mktemp("read") / "data"
    write_dataset(data)
    options = {"shuffle": True, "shuffle_buffer_size": 60, "batch_size": 8}
    made = [open_loader(data, num_ranks=2, rank=rank, **options)[0] for rank in range(2)]
    made.append(open_loader(data, **options)[0])
    batches = [iter(loader) for loader in made]
    for _ in range(3):
        for of_rank in batches:
            next(of_rank)
    yield made
    del batches


@pytest.fixture(scope="module")
def states(loaders: list[Any]) -> States:
    """The states of the two ranks."""
    return [loader.state_dict() for loader in loaders[:2]]


def rich(value: Any) -> dict[str, Any]:
    """A training's checkpoint: a model, its optimizer, objects of classes, and the loader's part."""
    model = torch.nn.Linear(16, 4)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 16)).sum().backward()
    optimizer.step()
    return {
        "epoch": 3,
        "model": model.state_dict(),
        "whole": model,
        "optimizer": optimizer.state_dict(),
        "hyper_parameters": {"dtype": torch.bfloat16, "path": Path("x"), "set": {1, 2}, "slice": slice(1, 2)},
        "loops": {"fit_loop": {"state_dict": {"combined_loader": [value]}}},
    }


def as_json(directory: Path, states: States, _: list[Any]) -> Path:
    path = directory / "states.json"
    path.write_text(json.dumps(states))
    return path


def as_torch_file(directory: Path, states: States, _: list[Any]) -> Path:
    torch.save(states, directory / "states.pt")
    return directory / "states.pt"


def as_checkpoint_file(directory: Path, states: States, _: list[Any]) -> Path:
    torch.save(rich({"ranks": states}), directory / "last.ckpt")
    return directory / "last.ckpt"


def as_rank_files(directory: Path, _: States, loaders: list[Any]) -> Path:
    for loader in loaders[:2]:
        save_rank_state(loader, directory / "ranks")
    return directory / "ranks"


def as_entries_of_ranks(directory: Path, _: States, loaders: list[Any]) -> Path:
    entries = {name: text for loader in loaders[:2] for name, text in CheckpointEntry(loader).state_dict().items()}
    dcp.save({"loader": entries, "model": torch.nn.Linear(4, 4).state_dict()}, checkpoint_id=directory / "dcp")
    return directory / "dcp"


def as_an_elastic_entry(directory: Path, states: States, _: list[Any]) -> Path:
    entry = {ALL_RANKS: dump_states(states)}
    dcp.save({"loader": entry, "model": torch.nn.Linear(4, 4).state_dict()}, checkpoint_id=directory / "elastic")
    return directory / "elastic"


def as_dumped_json(directory: Path, states: States, _: list[Any]) -> Path:
    path = directory / "dumped.json"
    path.write_text(dump_states(states))
    return path


FORMS: dict[str, Callable[..., Path]] = {
    form.__name__.replace("_", " "): form
    for form in (
        as_json,
        as_torch_file,
        as_checkpoint_file,
        as_rank_files,
        as_entries_of_ranks,
        as_an_elastic_entry,
        as_dumped_json,
    )
}


@pytest.mark.parametrize("form", FORMS)
def test_the_states_of_all_ranks_are_read_from_disk_and_from_s3(form, tmp_path, s3, states, loaders):
    source = FORMS[form](tmp_path, states, loaders)
    assert read_states(source) == read_states(str(source)) == states
    url = f"s3://{s3.new_bucket(tmp_path)}/{source.name}"
    assert read_states(url, s3.storage_options()) == states


def test_states_and_whatever_holds_them_are_read_as_they_are(states):
    assert read_states(states[0]) == [states[0]]
    assert read_states(states) == read_states(tuple(states)) == states
    assert read_states({"step": 3, "loader": {"ranks": states}}) == states
    assert read_states({"step": 3, "loader": states[1]}) == [states[1]]


@pytest.mark.parametrize("on_s3", [False, True], ids=["disk", "S3"])
def test_a_store_is_read_as_an_object_by_its_url_and_by_the_name_of_a_checkpoint(on_s3, tmp_path, s3, loaders):
    options = s3.storage_options() if on_s3 else None
    url = f"s3://{s3.new_bucket()}/store" if on_s3 else str(tmp_path / "store")
    store = CheckpointStore(url, storage_options=options)
    with pytest.raises(FileNotFoundError, match="no complete checkpoint"):
        read_states(store)
    loader, model = loaders[2], torch.nn.Linear(4, 4)
    first = store.save(1, model=model, loader=loader)
    then = [loader.state_dict()]
    batches = iter(open_loader(loader.dataset._opened_files.manifest.root)[0])
    next(batches)
    other, _ = open_loader(loader.dataset._opened_files.manifest.root, batch_size=4)
    store.save(2, model=model, loader=other)
    assert read_states(store) == read_states(url, options) == [other.state_dict()]
    assert read_states(f"{url}/{first.name}", options) == read_states(f"{url}/{first.name}/", options) == then


def test_a_checkpoint_of_a_store_that_was_cut_short_is_refused(tmp_path, loaders):
    store = CheckpointStore(tmp_path / "store")
    saved = store.save(1, model=torch.nn.Linear(4, 4), loader=loaders[2])
    Path(saved.url, "checkpoint.json").unlink()
    with pytest.raises(CheckpointStoreError, match="incomplete"):
        read_states(saved.url)
    with pytest.raises(FileNotFoundError, match="no complete checkpoint"):
        read_states(tmp_path / "store")


def test_several_loaders_are_told_apart_by_their_keys(tmp_path, loaders, states):
    alone = loaders[2]
    store = CheckpointStore(tmp_path / "store")
    store.save(1, loader=alone, other=open_loader(alone.dataset._opened_files.manifest.root)[0])
    with pytest.raises(ValueError, match="several loaders, under 'loader', 'other'"):
        read_states(store)
    assert read_states(store, key="loader") == [alone.state_dict()]
    kept = {"train": {"ranks": states}, "valid": alone.state_dict()}
    with pytest.raises(ValueError, match=r"under 'train\.ranks', 'valid'"):
        read_states(kept)
    assert read_states(kept, key="train") == states
    with pytest.raises(ValueError, match=r"no state of a loader under 'vald'; did you mean 'valid'"):
        read_states(kept, key="vald")
    with pytest.raises(ValueError, match="has none under 'valid': leave out the key"):
        read_states(states, key="valid")


def test_one_of_a_few_states_does_not_pass_for_all(tmp_path, loaders, states):
    with pytest.raises(ValueError, match="its item 1 is none: a dictionary with the keys"):
        read_states([states[0], {"step": 1}])
    directory = as_rank_files(tmp_path, states, loaders)
    (directory / "loader-00001-of-00002.json").write_text('{"step": 1}')
    with pytest.raises(ValueError, match=r"loader-00001-of-00002\.json holds no state of a loader"):
        read_states(directory)


FOREIGN: dict[str, tuple[Any, str]] = {
    "another file": (b"PAR1 and more", "it is another file, which begins with b'PAR1 and'"),
    "an empty file": (b"", "it is an empty file"),
    "a pickle": (pickle.dumps([1]), "it is a pickle"),
    "other JSON": (b'{"step": 3}', r"a dictionary with the keys \['step'\]; expected a state"),
    "cut JSON": (b'{"step": ', "is not a state"),
    "nested JSON": (b"[" * 100_000, "is not a state"),
}


@pytest.mark.parametrize("name", FOREIGN)
def test_a_foreign_file_is_refused_with_what_it_is(name, tmp_path):
    content, message = FOREIGN[name]
    path = tmp_path / "file"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=message) as raised:
        read_states(path)
    assert str(path) in str(raised.value)
    assert len(str(raised.value)) < 1000


def test_what_is_no_source_at_all_is_refused(tmp_path):
    torch.save({"model": torch.ones(3)}, tmp_path / "model.pt")
    with pytest.raises(ValueError, match=r"model\.pt holds no state of a loader: it is a dictionary with the keys"):
        read_states(tmp_path / "model.pt")
    with pytest.raises(ValueError, match=r"holds no states: it has \['model.pt'\]; expected loader-"):
        read_states(tmp_path)
    dcp.save({"model": torch.ones(3)}, checkpoint_id=tmp_path / "dcp")
    with pytest.raises(ValueError, match="holds no states: it has"):
        read_states(tmp_path / "dcp")
    with pytest.raises(FileNotFoundError):
        read_states(tmp_path / "nothing")
    with pytest.raises(TypeError, match="source is int: expected"):
        read_states(3)


class Hostile:
    """Makes a file where a pickle of it is loaded."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.write_text, (self.path, "code has run")


def test_what_a_pickle_names_is_never_run(tmp_path, states, loaders):
    mark = tmp_path / "mark"
    torch.save({"loader": states, "other": Hostile(mark)}, tmp_path / "states.pt")
    assert read_states(tmp_path / "states.pt") == states
    directory = as_an_elastic_entry(tmp_path, states, loaders)
    (directory / ".metadata").write_bytes(pickle.dumps(Hostile(mark)))
    with pytest.raises(ValueError, match=r"not what torch\.distributed\.checkpoint writes"):
        read_states(directory)
    assert not mark.exists()
    pickle.loads(pickle.dumps(Hostile(mark)))
    assert mark.exists(), "the pickle does nothing: the test proves nothing"


def test_a_few_bytes_that_stand_for_very_many_values_are_refused(tmp_path, states):
    many: Any = 0
    for _ in range(100):
        many = [many, many]
    torch.save({**states[0], "plan": {"root": many}}, tmp_path / "many.pt")
    with pytest.raises(ValueError, match="more than 20,000,000 values"):
        read_states(tmp_path / "many.pt")
    itself: dict[str, Any] = {**states[0]}
    itself["plan"] = itself
    torch.save(itself, tmp_path / "itself.pt")
    with pytest.raises(ValueError, match="more than 20,000,000 values"):
        read_states(tmp_path / "itself.pt")


def test_an_entry_names_no_file_outside_of_its_checkpoint(tmp_path, states, loaders):
    directory = as_an_elastic_entry(tmp_path, states, loaders)
    metadata = pickle.loads((directory / ".metadata").read_bytes())
    for place in metadata.storage_data.values():
        place.relative_path = f"../{directory.name}/{place.relative_path}"
    (directory / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(ValueError, match="outside of it"):
        read_states(directory)


def test_no_tensor_is_read(tmp_path, states):
    torch.save({"model": torch.zeros(1 << 25), "loader": states}, tmp_path / "large.pt")
    assert (tmp_path / "large.pt").stat().st_size > 1 << 27
    tracemalloc.start()
    try:
        found = read_states(tmp_path / "large.pt")
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert found == states
    assert peak < 1 << 21


def test_a_damaged_file_is_an_error_of_its_own_or_still_gives_states(tmp_path, states, loaders):
    directory = as_an_elastic_entry(tmp_path, states, loaders)
    damaged = [as_torch_file(tmp_path, states, loaders), directory / ".metadata", *directory.glob("*.distcp")]
    draw = random.Random(7)
    refused = []
    for path in damaged:
        whole = path.read_bytes()
        for number in range(60):
            content = bytearray(whole)
            if number % 3:
                content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
            else:
                del content[draw.randrange(len(content)) :]
            path.write_bytes(content)
            try:
                read_states(directory if path.parent == directory else path)
            except (ValueError, UnreadableFileError, FileNotFoundError) as error:
                refused.append(str(error))
        path.write_bytes(whole)
    assert len(refused) > 60, "the damage was not noticed"
    assert all(str(tmp_path) in message and len(message) < 5000 for message in refused)
