"""A model directory appears whole or not at all, and is built once."""

import threading
from pathlib import Path

import pytest

from girih.checkpoint import cache
from girih.errors import CheckpointError


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return tmp_path / "models" / "m"


def build(target: Path, text: str) -> None:
    with cache.exclusive(target), cache.staging(target) as directory:
        (directory / "weights").write_text(text)
        assert not (target / "weights").exists() or (target / "weights").read_text() != text
        cache.write_marker(directory, source_sha256=text)


def fail(target: Path, error: BaseException) -> None:
    with cache.exclusive(target), cache.staging(target) as directory:
        (directory / "half").touch()
        raise error


def test_the_cache_is_where_the_environment_says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("GIRIH_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache.cache_directory() == tmp_path / ".cache" / "girih"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache.cache_directory() == tmp_path / "xdg" / "girih"
    monkeypatch.setenv("GIRIH_HOME", "~/here")
    assert cache.model_directory("m") == tmp_path / "here" / "models" / "m"


def test_a_finished_build_is_ready_and_leaves_nothing_else(target: Path) -> None:
    assert not cache.is_ready(target)
    build(target, "one")
    assert cache.is_ready(target)
    assert cache.is_ready(target, "one")
    assert not cache.is_ready(target, "two")
    assert sorted(path.name for path in target.parent.iterdir()) == [".m.lock", "m"]


def test_a_directory_that_lost_or_changed_a_file_is_not_ready(target: Path) -> None:
    build(target, "one")
    (target / "weights").write_text("on")
    assert not cache.is_ready(target)
    (target / "weights").unlink()
    assert not cache.is_ready(target)


def test_a_home_that_does_not_exist_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GIRIH_HOME", "~no-such-user/cache")
    with pytest.raises(CheckpointError, match="GIRIH_HOME"):
        cache.cache_directory()


def test_a_new_build_replaces_the_old_one(target: Path) -> None:
    build(target, "one")
    (target / "stale").touch()
    build(target, "two")
    assert sorted(path.name for path in target.iterdir()) == ["girih.json", "weights"]
    assert cache.is_ready(target, "two")


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_failed_build_leaves_what_was_there(target: Path, error: type[BaseException]) -> None:
    build(target, "one")
    with pytest.raises(error):
        fail(target, error())
    assert cache.is_ready(target, "one")
    assert sorted(path.name for path in target.parent.iterdir()) == [".m.lock", "m"]


def test_leftovers_of_a_killed_builder_are_removed(target: Path) -> None:
    (target.parent / ".m.tmp-killed" / "new").mkdir(parents=True)
    (target.parent / ".other.tmp-alive").mkdir()
    build(target, "one")
    assert sorted(path.name for path in target.parent.iterdir()) == [".m.lock", ".other.tmp-alive", "m"]


def test_an_import_of_another_format_is_not_ready(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build(target, "one")
    monkeypatch.setattr(cache, "IMPORT_FORMAT", cache.IMPORT_FORMAT + 1)
    assert not cache.is_ready(target)


@pytest.mark.parametrize("content", ["", "{", "[]"])
def test_a_damaged_marker_is_not_ready(target: Path, content: str) -> None:
    target.mkdir(parents=True)
    (target / cache.MARKER_FILE).write_text(content)
    assert not cache.is_ready(target)


def test_one_builder_at_a_time(target: Path) -> None:
    inside, most = 0, 0
    guard = threading.Lock()

    def work() -> None:
        nonlocal inside, most
        with cache.exclusive(target):
            with guard:
                inside += 1
                most = max(most, inside)
            threading.Event().wait(0.01)
            with guard:
                inside -= 1

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == 1


def test_a_place_that_cannot_be_written_names_the_knob(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="GIRIH_HOME"), cache.exclusive(tmp_path / "file" / "m"):
        pass
    with pytest.raises(CheckpointError, match="GIRIH_HOME"), cache.staging(tmp_path / "nowhere" / "m"):
        pass


def test_a_full_disk_is_told_as_such(target: Path) -> None:
    with pytest.raises(CheckpointError, match=r"No space left.*GIRIH_HOME"):
        fail(target, OSError(28, "No space left on device"))
    assert not target.exists()
