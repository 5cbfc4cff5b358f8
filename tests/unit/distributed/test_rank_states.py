"""Lists and files of the states of ranks, without a process group."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from support import batches_of, open_loader, write_dataset

from torch_dataloader_utils import CheckpointMismatchError, CheckpointStore, RankMismatchError, to_device
from torch_dataloader_utils.distributed import (
    CheckpointEntry,
    gather_states,
    load_rank_state,
    own_state,
    save_rank_state,
)
from torch_dataloader_utils.distributed.entries import dump_states, parse_dumped

pytestmark = pytest.mark.filterwarnings("ignore::torch_dataloader_utils.UnevenRanksWarning")

FILES = ((130, 20), (7, 7), (111, 15), (95, 12))
ROWS = 343


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("distributed") / "data"
    assert write_dataset(directory, FILES) == ROWS
    return directory


def test_the_plan_digest_tells_files_of_another_content_apart(tmp_path):
    digests = set()
    for number in range(2):
        write_dataset(tmp_path / str(number), FILES)
        if number:
            table = pq.read_table(tmp_path / "1" / "part-000.parquet")
            doubled = table.set_column(0, "value", pc.multiply(table["value"], 2))
            pq.write_table(doubled, tmp_path / "1" / "part-000.parquet", row_group_size=FILES[0][1])
        digests.add(open_loader(tmp_path / str(number))[1].plan_digest)
    assert len(digests) == 2


def states_of(data: Path, num_ranks: int, stop: int = 3) -> list[dict[str, Any]]:
    """Return the states of all ranks, each after some batches."""
    states = []
    for rank in range(num_ranks):
        loader, _ = open_loader(data, batch_size=8, num_ranks=num_ranks, rank=rank)
        batches = iter(loader)
        for _ in range(stop):
            next(batches)
        states.append(loader.state_dict())
    return states


def test_own_state_finds_a_rank_in_any_order_of_the_list(data):
    states = states_of(data, 3)
    for order in itertools.permutations(states):
        assert [own_state(order, rank)["rank"] for rank in range(3)] == [0, 1, 2]


def test_own_state_asks_the_environment_of_torchrun_for_the_rank(data, monkeypatch):
    states = states_of(data, 2)
    assert own_state(states)["rank"] == 0
    monkeypatch.setenv("RANK", "1")
    assert own_state(states)["rank"] == 1


@pytest.mark.parametrize("ranks", [[0, 2], [0, 1, 1], [1, 2], [0, 0], []])
def test_own_state_refuses_a_list_in_which_a_rank_is_missing_or_twice(data, ranks):
    states = states_of(data, 3)
    with pytest.raises(RankMismatchError, match=r"rank"):
        own_state([states[rank] for rank in ranks], 0)


def test_own_state_refuses_a_rank_that_saved_nothing_and_says_how_many_did(data):
    with pytest.raises(RankMismatchError, match=r"rank 2 .*2 ranks"):
        own_state(states_of(data, 2), 2)


def test_own_state_refuses_a_list_that_lacks_the_last_ranks(data):
    with pytest.raises(RankMismatchError, match="rank"):
        own_state(states_of(data, 3)[:2], 0)


@pytest.mark.parametrize("name", ["a text", "no list", "long", "nested", "other ranks"])
def test_own_state_of_a_damaged_list_is_a_documented_error_in_few_words(data, name):
    state = states_of(data, 1)[0]
    nested: list[Any] = []
    for _ in range(5000):
        nested = [nested]
    damaged: dict[str, Any] = {
        "a text": [state | {"rank": "0"}],
        "no list": ["x" * 10_000_000],
        "long": [state | {"rank": number, "num_ranks": 10_000} for number in range(9999)],
        "nested": [state | {"rank": rank, "num_ranks": 2, "plan_digest": [rank, nested]} for rank in range(2)],
        "other ranks": [state | {"rank": [rank], "num_ranks": {}} for rank in range(2)],
    }
    with pytest.raises(ValueError, match=r"rank|not a list") as raised:
        own_state(damaged[name], 0)
    assert len(str(raised.value)) < 4096


def test_another_ranks_state_and_one_of_more_ranks_are_refused(data):
    loader, _ = open_loader(data, batch_size=8, num_ranks=2, rank=0)
    with pytest.raises(CheckpointMismatchError, match="rank changed: checkpoint=1, current=0"):
        loader.load_state_dict(states_of(data, 2)[1])
    with pytest.raises(CheckpointMismatchError, match="num_ranks changed: checkpoint=3, current=2"):
        loader.load_state_dict(states_of(data, 3)[0])


def test_without_a_process_group_the_gathered_list_has_one_state(data):
    loader, _ = open_loader(data, batch_size=8)
    whole = batches_of(loader)
    batches = iter(loader)
    next(batches)
    states = gather_states(loader)
    assert len(states) == 1
    fresh, _ = open_loader(data, batch_size=8)
    fresh.load_state_dict(own_state(states))
    assert batches_of(fresh) == whole[1:]


def test_a_rank_whose_file_is_missing_is_an_error_with_what_the_directory_holds(data, tmp_path):
    loader, _ = open_loader(data, batch_size=8, num_ranks=2, rank=0)
    path = save_rank_state(loader, tmp_path / "step-1")
    assert [one.name for one in path.parent.iterdir()] == ["loader-00000-of-00002.json"]
    for other in ({"num_ranks": 2, "rank": 1}, {"num_ranks": 1, "rank": 0}):
        fresh, _ = open_loader(data, batch_size=8, **other)
        with pytest.raises(FileNotFoundError, match=r"loader-00000-of-00002\.json"):
            load_rank_state(fresh, tmp_path / "step-1")
    with pytest.raises(FileNotFoundError, match=r"nothing.*no state of another rank: is this the directory\?"):
        load_rank_state(loader, tmp_path / "nothing")


def test_states_of_another_number_of_ranks_name_what_loads_them(data, tmp_path):
    loader, _ = open_loader(data, batch_size=8, num_ranks=2, rank=0)
    save_rank_state(loader, tmp_path)
    other, _ = open_loader(data, batch_size=8, num_ranks=3, rank=0)
    with pytest.raises(FileNotFoundError, match="of another number of ranks: with strict=False"):
        load_rank_state(other, tmp_path)
    lacking, _ = open_loader(data, batch_size=8, num_ranks=2, rank=1)
    with pytest.raises(FileNotFoundError) as error:
        load_rank_state(lacking, tmp_path)
    assert "strict" not in str(error.value)


def test_a_checkpoint_that_holds_states_and_a_state_where_a_list_belongs_say_what_to_pass(data):
    loader, dataset = open_loader(data, batch_size=8)
    state = dataset.state_dict()
    for checkpoint, said in (
        ({"model": {}, "loader": state}, "a state under 'loader'"),
        ({"all": [state]}, "under 'all'"),
    ):
        with pytest.raises(ValueError, match=rf"a checkpoint that holds .*{said}: pass that"):
            loader.load_state_dict(checkpoint)
    with pytest.raises(ValueError, match="the state of one rank: load it as it is"):
        own_state(state)
    dataset.load_state_dict(state_dict=state)
    assert dataset.progress() == loader.progress()


def test_a_state_that_cannot_be_written_is_an_error_that_names_its_file_and_leaves_nothing(data, tmp_path):
    loader, _ = open_loader(data, batch_size=8, num_ranks=2, rank=1)
    (tmp_path / "loader-00001-of-00002.json").mkdir()
    with pytest.raises(OSError, match=r"loader-00001-of-00002\.json'?$"):
        save_rank_state(loader, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["loader-00001-of-00002.json"]


def test_a_file_that_is_no_state_is_an_error_that_names_it(data, tmp_path):
    loader, _ = open_loader(data, batch_size=8)
    path = Path(save_rank_state(loader, tmp_path))
    state = path.read_bytes()
    damaged = state.replace(b'"epoch": 0', b'"epoch": 1')
    for content in (state[:-9], b"[" * 100_000, b"\xff", b"{}", damaged):
        path.write_bytes(content)
        for strict in (True, False):
            with pytest.raises(ValueError, match=r"loader-00000-of-00001\.json(:| is) not a state"):
                load_rank_state(loader, tmp_path, strict=strict)


def test_a_checkpoints_entry_that_is_no_state_is_a_documented_error(data):
    for text in ("[" * 100_000, "{", "{}"):
        with pytest.raises(ValueError, match="not a state"):
            CheckpointEntry(open_loader(data)[0]).load_state_dict({"rank-0-of-1": text})


@pytest.mark.parametrize(
    "text", ["{", "{}", "[]", "null", '{"shared": 1, "ranks": [{}]}', '{"shared": {}, "ranks": ["x"]}']
)
def test_an_entry_of_all_ranks_that_is_no_such_entry_is_a_documented_error(data, text):
    with pytest.raises(ValueError, match="'states_of_all_ranks' is not a state"):
        CheckpointEntry(open_loader(data)[0], elastic=True).load_state_dict({"states_of_all_ranks": text})


def test_an_entry_of_all_ranks_writes_once_what_is_equal_on_all_of_them_and_loses_nothing(data):
    states = states_of(data, 3)
    text = dump_states(states)
    assert parse_dumped(text, "it") == states
    assert text.count(json.dumps(states[0]["files"])) == text.count(json.dumps(states[0]["plan"])) == 1
    assert len(text) < len(json.dumps(states)) - 2 * len(json.dumps(states[0]["files"]))
    changed = [states[0], *(state | {"files": None} for state in states[1:])]
    assert parse_dumped(dump_states(changed), "it") == changed


def test_an_entry_of_all_ranks_is_not_made_of_one_of_them_where_there_is_no_process_group(data):
    entry = CheckpointEntry(open_loader(data, num_ranks=2, rank=1)[0], elastic=True)
    with pytest.raises(RankMismatchError, match=r"holds ranks \[1\], saved by \[2\] ranks"):
        entry.state_dict()


def test_states_are_kept_on_any_storage(data):
    loader, _ = open_loader(data, batch_size=8)
    whole = batches_of(loader)
    next(iter(loader))
    written = save_rank_state(loader, "memory://checkpoints/step-[1]/")
    assert written == "memory:///checkpoints/step-[1]/loader-00000-of-00001.json"
    fresh, _ = open_loader(data, batch_size=8)
    load_rank_state(fresh, "memory://checkpoints/step-[1]")
    assert batches_of(fresh) == whole[1:]
    with pytest.raises(FileNotFoundError, match="memory:///checkpoints/step-2/loader-00000"):
        load_rank_state(fresh, "memory://checkpoints/step-2")


def test_a_store_keeps_every_loader_and_dataset_that_it_is_given(data: Path, tmp_path: Path):
    def opened() -> dict[str, Any]:
        loaders = [open_loader(data, batch_size=8) for _ in range(3)]
        return {"loader": loaders[0][0], "copied": to_device(loaders[1][0], "cpu"), "tested": loaders[2][1]}

    saved, restored = opened(), opened()
    rests = {}
    for number, (name, each) in enumerate(saved.items(), start=2):
        batches = iter(each)
        for _ in range(number):
            next(batches)
        rests[name] = each.state_dict()
    store = CheckpointStore(tmp_path)
    store.save(1, **saved)
    store.restore(**restored)
    assert {name: each.state_dict() for name, each in restored.items()} == rests
    assert own_state([saved["loader"].state_dict()], source=saved["copied"])["rank"] == 0


class Wrapped:
    """What frameworks' adapters are: its state is that of all ranks."""

    def state_dict(self) -> dict[str, Any]:
        """Return a state."""
        return {"ranks": []}

    def load_state_dict(self, _state: Any) -> None:
        """Load a state."""


@pytest.mark.parametrize(
    "call",
    [
        pytest.param(lambda wrapped, _: gather_states(wrapped), id="gather"),
        pytest.param(save_rank_state, id="save a rank"),
        pytest.param(load_rank_state, id="load a rank"),
        pytest.param(lambda wrapped, _: CheckpointEntry(wrapped).state_dict(), id="an entry"),
        pytest.param(lambda wrapped, directory: CheckpointStore(directory).save(1, loader=wrapped), id="a store"),
    ],
)
def test_what_has_another_state_than_one_rank_is_refused_by_name(tmp_path: Path, call: Any):
    with pytest.raises(TypeError, match="the state of Wrapped is not that of one rank's loader"):
        call(Wrapped(), tmp_path)
