"""The directory of a harvest: what it may hold before, and that one run alone writes to it."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Thread
from typing import Any

import filelock
import pytest

import gemloupe
from gemloupe import Store, harvest
from gemloupe.errors import BadArgument, DamagedStore
from gemloupe.harvesting import directory
from gemloupe.harvesting.directory import alone, sees, tidy
from gemloupe.testing import tiny
from tests.harvesting.data import OUTPUT, files, forwards, model, rows_of_ids


def small(out: Any, of: Any = None, **options: Any) -> Store:
    call = {"tokens_per_batch": 15, "shard_bytes": 6000, "progress": False} | options
    return harvest(of or model(), rows_of_ids(), OUTPUT, out, **call)


def put(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"precious")
    return path


@pytest.mark.parametrize(
    "mine",
    ["shards/model-00001.safetensors", "shards/notes/a.txt", ".unfinished/mine", "thesis.tex"],
)
def test_what_somebody_put_there_is_refused_and_stays(mine: str, tmp_path: Path):
    there = put(tmp_path / mine)
    with forwards(model()) as ran, pytest.raises(BadArgument, match="is no store and is not empty: it has"):
        small(tmp_path)
    assert ran == []
    assert there.read_bytes() == b"precious"
    assert list(files(tmp_path)) == [mine]


@pytest.mark.parametrize("theirs", [".DS_Store", "lost+found/x"])
def test_what_a_system_puts_everywhere_is_left_alone(theirs: str, tmp_path: Path):
    there = put(tmp_path / theirs)
    assert small(tmp_path).complete
    assert there.read_bytes() == b"precious"


def test_files_that_no_harvest_writes_stay_in_a_store(tmp_path: Path):
    small(tmp_path)
    there = put(tmp_path / "shards" / "mine.safetensors")
    record = Store(tmp_path).shards[1]
    for path in tmp_path.glob(f"shards/{record.file.partition('.')[0]}.*"):
        path.unlink()
    assert small(tmp_path).complete
    assert there.read_bytes() == b"precious"


@pytest.mark.parametrize(
    ("out", "words"),
    [
        (None, "out is the directory to write to, not None"),
        (7, "out is the directory to write to, not 7"),
        ("", "out is the directory to write to, not ''"),
        ("a\0b", "out is the directory to write to, not 'a"),
    ],
    ids=["none", "number", "empty", "nul"],
)
def test_what_is_no_directory(out: Any, words: str):
    with pytest.raises(BadArgument, match=words):
        small(out)


def test_a_file_and_a_link_to_nothing(tmp_path: Path):
    put(tmp_path / "file")
    with pytest.raises(BadArgument, match="is a file, not a directory"):
        small(tmp_path / "file")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    with pytest.raises(BadArgument, match="is a link to nothing"):
        small(tmp_path / "link")


# ---- one run alone -----------------------------------------------------------------------------------------

HOLD = """
import sys
from pathlib import Path
from gemloupe.harvesting.directory import alone
with alone(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.readline()
"""


@contextmanager
def held_elsewhere(out: Path) -> Iterator[None]:
    """Another process holds the directory."""
    place = str(Path(gemloupe.__file__).parents[1])
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(out)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": place},
    )
    with process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        yield
        process.kill()


def test_a_second_run_is_refused_while_the_first_writes(tmp_path: Path):
    of = model()
    with held_elsewhere(tmp_path / "s"), forwards(of) as ran:
        before = files(tmp_path)
        with pytest.raises(BadArgument, match=r"another run is writing to .*s\. Wait until it ends"):
            small(tmp_path / "s", of)
        assert files(tmp_path) == before
    assert ran == []
    # The process that held it was killed, and holds it no more.
    assert small(tmp_path / "s", of).complete
    assert not (tmp_path / "s" / ".unfinished").exists()


def test_a_store_that_may_not_be_written_is_returned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    small(tmp_path / "s")

    def refuse(*_: Any, **__: Any) -> Any:
        raise PermissionError(13, "Permission denied")

    for name in ("write_bytes", "write_text", "mkdir", "unlink", "replace"):
        monkeypatch.setattr(Path, name, refuse)
    assert small(tmp_path / "s").complete
    # But what is to be written is refused.
    with pytest.raises(BadArgument, match="holds another harvest"):
        small(tmp_path / "s", robust=True)
    with pytest.raises(BadArgument, match=r"cannot be written: .*Permission denied"):
        small(tmp_path / "new")


def test_a_run_that_is_refused_leaves_the_directory_free(tmp_path: Path):
    small(tmp_path)
    before = files(tmp_path)
    for _ in range(2):
        with pytest.raises(BadArgument, match="holds another harvest"):
            small(tmp_path, robust=True)
    assert files(tmp_path) == before
    with alone(tmp_path):
        pass


def test_one_of_many_holds_the_directory_and_the_others_are_told(tmp_path: Path):
    inside: list[int] = []
    found: list[str] = []
    out = tmp_path / "s"

    def run(number: int) -> None:
        for _ in range(60):
            try:
                with alone(out):
                    inside.append(number)
                    assert inside == [number]
                    directory.mark_run(out)
                    time.sleep(0.001)
                    tidy(out)  # as a run does at its end
                    inside.remove(number)
                found.append("held")
            except BaseException as error:
                found.append("refused" if "another run is writing to" in str(error) else repr(error))

    threads = [Thread(target=run, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(found) == {"held", "refused"}
    assert {each.name for each in out.iterdir()} - {".lock"} == {
        "shards"
    }  # some releases of filelock remove it


def test_a_file_system_without_locks_is_written_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def refuse(*_: Any, **__: Any) -> Any:
        raise NotImplementedError("no locks")

    monkeypatch.setattr(filelock.FileLock, "acquire", refuse)
    assert small(tmp_path / "none").complete

    def unsupported(*_: Any, **__: Any) -> Any:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(filelock.FileLock, "acquire", unsupported)
    assert small(tmp_path / "no locks").complete

    def vanished(*_: Any, **__: Any) -> Any:
        raise OSError(errno.ENOENT, "No such file")

    monkeypatch.setattr(filelock.FileLock, "acquire", vanished)
    with pytest.raises(BadArgument, match="cannot be written"):
        small(tmp_path / "gone")


def test_a_process_that_sees_another_directory_gives_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(directory, "_PATIENCE", 0.2)
    with alone(tmp_path / "here"):
        mark = directory.mark_run(tmp_path / "here")
        assert sees(tmp_path / "here", mark)
        assert not sees(tmp_path / "here", "another run's")
        assert not sees(tmp_path / "there", mark)


# ---- an index that was lost or changed ---------------------------------------------------------------------


def test_a_lost_index_is_made_again_of_the_shards(tmp_path: Path):
    of = model()
    wanted = files(small(tmp_path, of).path)
    (tmp_path / "index.json").unlink()
    with forwards(of) as ran:
        small(tmp_path, of)
    assert len(ran) == 1  # to compare
    assert files(tmp_path) == wanted


def test_a_cut_index_says_what_to_do_about_it(tmp_path: Path):
    wanted = files(small(tmp_path).path)
    os.truncate(tmp_path / "index.json", 100)
    for open_it in (Store, small):
        with pytest.raises(
            DamagedStore, match="Remove it and make the same harvest again: it finds the shards"
        ):
            open_it(tmp_path)
    (tmp_path / "index.json").unlink()
    small(tmp_path)
    assert files(tmp_path) == wanted


def test_shards_of_another_harvest_are_not_adopted(tmp_path: Path):
    small(tmp_path)
    (tmp_path / "index.json").unlink()
    before = files(tmp_path)
    with pytest.raises(BadArgument, match=r"the shard 0000000000\.safetensors of another harvest"):
        small(tmp_path, tiny("e2b", seed=77))
    assert files(tmp_path) == before


def test_an_index_lost_while_the_statistics_were_written(tmp_path: Path):
    wanted = files(small(tmp_path).path)
    for name in ("index.json", "statistics.safetensors"):
        (tmp_path / name).unlink()
    (tmp_path / ".unfinished").mkdir()
    (tmp_path / ".unfinished" / "statistics.safetensors").write_bytes(b"half")
    small(tmp_path)
    assert files(tmp_path) == wanted


def test_an_index_that_names_a_shard_twice_is_found(tmp_path: Path):
    small(tmp_path)
    index = json.loads((tmp_path / "index.json").read_text())
    first, second = index["shards"][:2]
    index["shards"][1] = first | {"rows": second["rows"]}
    (tmp_path / "index.json").write_text(json.dumps(index))
    with pytest.raises(DamagedStore, match="has a batch twice"):
        Store(tmp_path)


@pytest.mark.parametrize("change", ["rows", "records"])
def test_an_index_that_was_changed_is_found_and_made_again(change: str, tmp_path: Path):
    wanted = files(small(tmp_path).path)
    text = (tmp_path / "index.json").read_text()
    first, second = Store(tmp_path).shards[:2]
    if change == "rows":
        changed = text.replace(
            f'"rows": {first.rows},\n   "batches"', f'"rows": {first.rows - 1},\n   "batches"'
        )
    else:
        start, end = text.index('{\n   "file"'), text.index(f'{{\n   "file": "{second.file}"')
        changed = text[:start] + text[end:]
    assert changed != text
    (tmp_path / "index.json").write_text(changed)
    with pytest.raises(DamagedStore, match=r"was changed: its shards have \d+ rows, and 81 were harvested"):
        Store(tmp_path)
    small(tmp_path)
    assert files(tmp_path) == wanted


def test_rows_that_were_moved_from_one_record_to_another_are_found(tmp_path: Path):
    small(tmp_path)
    text = (tmp_path / "index.json").read_text()
    for record, moved in zip(Store(tmp_path).shards[:2], (-1, 1), strict=True):
        text = text.replace(
            f'"file": "{record.file}",\n   "rows": {record.rows}',
            f'"file": "{record.file}",\n   "rows": {record.rows + moved}',
        )
    (tmp_path / "index.json").write_text(text)
    with pytest.raises(DamagedStore, match="has other rows"):
        Store(tmp_path)[OUTPUT][:]


@pytest.mark.parametrize("change", ["gone", "cut", "flipped"])
def test_statistics_that_were_changed_are_found_and_made_again(change: str, tmp_path: Path):
    wanted = files(small(tmp_path).path)
    path = tmp_path / "statistics.safetensors"
    data = path.read_bytes()
    path.unlink()
    if change != "gone":
        path.write_bytes(data[:60] if change == "cut" else data[:-1] + bytes([data[-1] ^ 1]))
    store = Store(tmp_path)
    for use in (store.verify, lambda: store.statistics):
        with pytest.raises(
            DamagedStore, match=r"statistics\.safetensors is gone or was changed. Make the same"
        ):
            use()
    small(tmp_path)
    assert files(tmp_path) == wanted
