"""Local files: which are mapped into memory, and that reading others never returns fewer bytes than asked for."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from torch_dataloader_utils import StructuredDataset
from torch_dataloader_utils.storage import local_file
from torch_dataloader_utils.storage.filesystem import Storage
from torch_dataloader_utils.storage.local_file import RangedFile, filesystem_type, may_be_mapped, read_into
from torch_dataloader_utils.storage.stored_file import StoredFile

NETWORK = {
    "nfs": 0x6969,
    "smb": 0x517B,
    "cifs": 0xFF534D42,
    "smb2": 0xFE534D42,
    "lustre": 0x0BD00BD0,
    "ceph": 0x00C36400,
    "gpfs": 0x47504653,
    "beegfs": 0x19830326,
    "fuse": 0x65735546,
    "9p": 0x01021997,
    "afs": 0x5346414F,
}
"""Numbers of network file systems, of statfs(2), of `linux/magic.h`, and of their own sources."""

PROC = 0x9FA0


@pytest.mark.parametrize("name", NETWORK)
def test_files_of_network_file_systems_are_not_mapped(name: str):
    assert not may_be_mapped(NETWORK[name])


def test_files_of_an_unknown_file_system_are_not_mapped():
    assert not may_be_mapped(None)
    assert not may_be_mapped(0x12345678)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux says it")
def test_the_system_says_which_file_system_a_file_is_on():
    assert local_file.LOCAL_FILESYSTEMS[filesystem_type("/dev/shm") or 0] == "tmpfs"  # noqa: S108 - nothing is written
    assert filesystem_type("/proc/self/status") == PROC
    assert filesystem_type("/no/such/file") is None


def test_the_type_of_a_file_is_that_of_its_mount(tmp_path: Path):
    mounts = [line.split(" - ") for line in Path("/proc/self/mountinfo").read_text(encoding="utf-8").splitlines()]
    by_point = {left.split()[4]: right.split()[0] for left, right in mounts}
    point = next(str(folder) for folder in (tmp_path, *tmp_path.parents) if str(folder) in by_point)
    known = {number for number, names in local_file.LOCAL_FILESYSTEMS.items() if by_point[point].rstrip("fs") in names}
    assert may_be_mapped(filesystem_type(str(tmp_path))) == (filesystem_type(str(tmp_path)) in known)


@pytest.mark.parametrize(("told", "is_mapped"), [(None, False), (True, True), (False, False)])
def test_the_option_decides_before_the_file_system_does(tmp_path: Path, monkeypatch, told, is_mapped):
    monkeypatch.setattr("torch_dataloader_utils.storage.filesystem.filesystem_type", lambda _: NETWORK["nfs"])
    storage, [location] = Storage.for_urls([str(tmp_path / "a")], memory_map=told)
    assert storage.maps(StoredFile("a", location, 1, None, None)) == is_mapped


def test_other_storages_are_never_mapped():
    storage, [location] = Storage.for_urls(["memory://a"], memory_map=True)
    assert not storage.maps(StoredFile("a", location, 1, None, None))


def test_a_range_comes_back_whole_where_the_system_returns_it_in_pieces(tmp_path: Path, monkeypatch):
    content = os.urandom(1000)
    (tmp_path / "a").write_bytes(content)
    monkeypatch.setattr(os, "preadv", lambda number, buffers, start: _some(os.pread(number, 7, start), buffers[0]))
    assert bytes(RangedFile(str(tmp_path / "a")).read(100, 200)) == content[100:200]


def _some(piece: bytes, buffer: memoryview) -> int:
    count = min(len(piece), len(buffer))
    buffer.cast("B")[:count] = piece[:count]
    return count


def test_a_range_beyond_the_end_is_an_error(tmp_path: Path):
    (tmp_path / "a").write_bytes(bytes(100))
    with (tmp_path / "a").open("rb") as file, pytest.raises(OSError, match="10 bytes came back of bytes 90 to 110"):
        read_into(file.fileno(), 90, bytearray(20))


def test_a_file_that_was_written_since_it_was_opened_is_an_error(tmp_path: Path):
    path = tmp_path / "a"
    path.write_bytes(bytes(100))
    opened = RangedFile(str(path))
    assert opened.ends_with(bytes(10))
    os.utime(path, (1, 1))
    with pytest.raises(OSError, match="written while it was read"):
        opened.read(0, 10)


def test_its_descriptor_is_closed_when_nothing_refers_to_it(tmp_path: Path):
    path = tmp_path / "a"
    path.write_bytes(bytes(100))
    opened = RangedFile(str(path))
    links = [entry.readlink() for entry in Path("/proc/self/fd").iterdir() if entry.is_symlink()]
    assert path in links
    del opened
    links = [entry.readlink() for entry in Path("/proc/self/fd").iterdir() if entry.is_symlink()]
    assert path not in links


def test_an_option_that_is_no_flag_is_refused_by_name(tmp_path: Path):
    with pytest.raises(TypeError, match="memory_map=1 is int, expected True or False"):
        StructuredDataset.create_dataloader(tmp_path, memory_map=1)  # type: ignore[arg-type]
