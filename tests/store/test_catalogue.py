"""The catalogue: what was recorded is there after a restart, and nothing else is."""

from __future__ import annotations

import pytest

from spindle.errors import InvalidRequest, NotFound
from spindle.store.catalogue import Catalogue, RunRow, SamplerRow, SessionRow, checkpoint_row
from spindle.store.names import TinkerPath, check_name, check_ttl, parse_path

RUN = "s1:train:0"


class Clock:
    now = 1_000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def catalogue(tmp_path, clock):
    catalogue = Catalogue(tmp_path / "store", clock)
    yield catalogue
    catalogue.close()


def run_row(run_id: str = RUN, owner: str = "ann", at: float = 1.0) -> RunRow:
    return RunRow(run_id, run_id.split(":")[0], owner, at, at, "org/tiny", {"rank": 8}, {"type": "adamw"}, {"k": 1})


def save(catalogue: Catalogue, name: str, kind: str = "weights", owner: str = "ann", replace: bool = False, ttl: int | None = None):
    path = TinkerPath(RUN, kind, name)
    files = catalogue.new_checkpoint_directory(path)
    files.mkdir(parents=True)
    (files / "data").write_bytes(b"12345")
    row = checkpoint_row(catalogue, path, owner, files, ttl, {"tag": name})
    catalogue.add_checkpoint(row, replace)
    return row


def test_everything_survives_a_restart(tmp_path, clock):
    first = Catalogue(tmp_path / "store", clock)
    session = SessionRow("s1", "ann", 5.0, tags=["t"], user_metadata={"a": "b"}, display_name="d", sdk_version="0.38")
    sampler = SamplerRow("s1:sample:0", "s1", "ann", 5.0, "org/tiny", f"tinker://{RUN}/sampler_weights/x")
    first.add_session(session)
    first.add_run(run_row())
    first.add_sampler(sampler)
    checkpoint = save(first, "x")
    first.close()
    second = Catalogue(tmp_path / "store", clock)
    assert second.session("s1") == session
    assert second.run(RUN) == run_row()
    assert second.sampler("s1:sample:0") == sampler
    assert second.checkpoint(checkpoint.path) == checkpoint
    assert (second.files(checkpoint) / "data").read_bytes() == b"12345"
    second.close()


def test_two_kinds_of_one_name_are_two_checkpoints(catalogue):
    first, second = save(catalogue, "0000"), save(catalogue, "0000", kind="sampler_weights")
    assert catalogue.checkpoints_of_run(RUN) == sorted([first, second], key=lambda row: row.kind)
    assert catalogue.files(first) != catalogue.files(second)


def test_a_taken_name_is_refused_and_the_new_files_go(catalogue):
    old = save(catalogue, "x")
    with pytest.raises(InvalidRequest, match="exists already: choose another name, or overwrite it"):
        save(catalogue, "x")
    assert [path.name for path in catalogue.files(old).parent.iterdir()] == [catalogue.files(old).name]


def test_overwriting_swaps_one_row_and_removes_the_old_files(catalogue):
    old, new = save(catalogue, "x"), save(catalogue, "x", replace=True)
    assert catalogue.checkpoint(old.path) == new
    assert catalogue.files(new).exists() and not catalogue.files(old).exists()


def test_an_expired_checkpoint_is_gone_for_readers_and_then_from_disk(catalogue, clock):
    row, kept = save(catalogue, "x", ttl=3600), save(catalogue, "y")
    assert catalogue.delete_expired() == 4_600.0
    clock.now = 4_600.0
    with pytest.raises(NotFound, match=f"no checkpoint tinker://{RUN}/weights/x: it was never saved, was deleted, or has expired"):
        catalogue.checkpoint(row.path)
    assert catalogue.checkpoints("ann", 10, 0) == ([kept], 1)
    assert catalogue.delete_expired() is None
    assert not catalogue.files(row).exists()


def test_deleting_removes_row_and_files(catalogue):
    row = save(catalogue, "x")
    catalogue.delete_checkpoint(row.path)
    assert not catalogue.files(row).exists()
    with pytest.raises(NotFound):
        catalogue.delete_checkpoint(row.path)


def test_publishing_and_expiry_can_be_changed(catalogue):
    row = save(catalogue, "x")
    catalogue.publish_checkpoint(row.path, True)
    catalogue.expire_checkpoint(row.path, 9_999.0)
    changed = catalogue.checkpoint(row.path)
    assert (changed.public, changed.expires_at) == (True, 9_999.0)


def test_pages_are_newest_first_and_only_the_owners(catalogue, clock):
    rows = []
    for number in range(5):
        clock.now += 1
        rows.append(save(catalogue, f"c{number}"))
    save(catalogue, "other", owner="bob")
    assert catalogue.checkpoints("ann", 2, 1) == ([rows[3], rows[2]], 5)
    for number in range(3):
        catalogue.add_run(run_row(f"s1:train:{number}", at=float(number)))
    page, total = catalogue.runs("ann", 2, 0)
    assert ([row.run_id for row in page], total) == (["s1:train:2", "s1:train:1"], 3)
    assert catalogue.runs("bob", 2, 0) == ([], 0)


def test_the_first_finish_of_a_session_wins(catalogue):
    catalogue.add_session(SessionRow("s1", "ann", 5.0))
    catalogue.finish_session("s1", "success", "done")
    catalogue.finish_session("s1", "errored", "late")
    row = catalogue.session("s1")
    assert (row.status, row.detail) == ("success", "done")


def test_clones_of_a_sampler_get_distinct_numbers(catalogue):
    catalogue.add_sampler(SamplerRow("s1:sample:0", "s1", "ann", 5.0, "org/tiny"))
    assert [catalogue.join_sampler("s1:sample:0") for _ in range(3)] == [1, 2, 3]
    with pytest.raises(NotFound):
        catalogue.join_sampler("nobody")


def test_files_without_a_row_are_swept_at_start(tmp_path, clock):
    catalogue = Catalogue(tmp_path / "store", clock)
    row = save(catalogue, "x")
    orphan = catalogue.new_checkpoint_directory(TinkerPath(RUN, "weights", "orphan"))
    orphan.mkdir()
    half = orphan.parent / ".writing-abc-y"
    half.mkdir()
    catalogue.close()
    again = Catalogue(tmp_path / "store", clock)
    assert [path for path in orphan.parent.iterdir()] == [again.files(row)]
    again.close()


def test_two_servers_cannot_share_a_store(catalogue):
    with pytest.raises(InvalidRequest, match="is in use by another server"):
        Catalogue(catalogue.directory)


@pytest.mark.parametrize("text", ["x", "tinker://a/weights", "tinker://a/weights/b/c", "tinker:///weights/b", "/a/weights/b"])
def test_what_is_not_a_path_says_what_a_path_is(text):
    with pytest.raises(InvalidRequest, match="is not a checkpoint path: expected tinker://"):
        parse_path(text)


def test_an_unknown_kind_is_named():
    with pytest.raises(InvalidRequest, match="names the unknown kind 'weight'"):
        parse_path("tinker://a/weight/b")


@pytest.mark.parametrize("name", ["", "..", ".x", "-x", "a/b", "a b", "x" * 129, "a\0"])
def test_bad_names_are_refused(name):
    with pytest.raises(InvalidRequest, match="is not allowed: 1 to 128 letters"):
        check_name(name)


@pytest.mark.parametrize("ttl", [0, 3599, 10**10, -1])
def test_bad_ttls_are_refused(ttl):
    with pytest.raises(InvalidRequest, match=f"ttl_seconds is {ttl}, allowed is 3600"):
        check_ttl(ttl)
