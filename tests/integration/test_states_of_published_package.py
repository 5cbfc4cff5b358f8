"""A state of the package that PyPI has under this name is refused with a message that says what to do.

`resources/published_states` holds states that its version 0.2.0 saved. It read three files of 40, 30 and 10 rows: one
rank without workers after 3 batches of 5 rows; one rank after 13, when one of 2 workers had ended; and 2 ranks of 2
workers after 8 batches each, shuffled.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support import batches_of, open_loader, write_dataset

from torch_dataloader_utils import CheckpointMismatchError

STATES = json.loads((Path(__file__).parents[1] / "resources" / "published_states" / "states.json").read_text())
PAGE = Path(__file__).parents[2] / "docs" / "coming_from" / "previous_package.md"


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("name", STATES)
def test_a_state_of_the_published_package_is_refused_with_what_to_do(tmp_path: Path, name: str, strict: bool):
    write_dataset(tmp_path / "data", ((40, 10), (30, 10), (10, 10)))
    loader, dataset = open_loader(tmp_path / "data", batch_size=5)
    before = dataset.state_dict()
    for source in (loader, dataset):
        with pytest.raises(
            ValueError, match=r"PyPI has under the same name.* set_epoch\(0\).* set_epoch\(1\)"
        ) as raised:
            source.load_state_dict(STATES[name], strict=strict)
        assert not isinstance(raised.value, CheckpointMismatchError)
    assert dataset.state_dict() == before
    assert len(batches_of(loader)) == 16


def test_the_page_for_its_users_shows_the_message(tmp_path: Path):
    write_dataset(tmp_path / "data")
    loader, _ = open_loader(tmp_path / "data")
    with pytest.raises(ValueError, match="PyPI") as raised:
        loader.load_state_dict(STATES["begun"] | {"epoch": 3})
    assert f"ValueError: {raised.value}" in " ".join(PAGE.read_text(encoding="utf-8").split())
