"""What comes into a machine's mailbox: whole, as the manifest says, in an order that can be used, and nowhere else."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from tasks.node.inbox import BadManifest, Inbox, files_of, place


class Store:
    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.asked: list[str] = []

    def say(self, **files: str) -> None:
        for name, content in files.items():
            self.files[name.replace("__", "/").replace("_", ".")] = content.encode()
        named = {name: hashlib.sha256(self.files[name]).hexdigest() for name in self.files if name != "manifest.json"}
        self.files["manifest.json"] = json.dumps({"files": named}).encode()

    def get(self, name: str) -> bytes:
        self.asked.append(name)
        try:
            return self.files[name]
        except KeyError:
            raise OSError(f"no {name}") from None


def test_what_is_new_or_changed_is_fetched_and_nothing_else(tmp_path: Path) -> None:
    store = Store()
    inbox = Inbox(tmp_path, store.get)
    with pytest.raises(OSError, match=r"no manifest\.json"):
        inbox.fetch()
    store.say(plan_json="1", workloads__d_py="w")
    assert inbox.fetch() == ["workloads/d.py", "plan.json"]
    assert (tmp_path / "workloads" / "d.py").read_text() == "w"
    store.say(plan_json="2")
    store.asked.clear()
    assert inbox.fetch() == ["plan.json"]
    assert store.asked == ["manifest.json", "plan.json"]
    assert (tmp_path / "plan.json").read_text() == "2"
    assert sorted(one.name for one in tmp_path.iterdir()) == ["plan.json", "workloads"]


def test_a_plan_comes_after_its_workloads_and_the_end_last() -> None:
    names = ("done.json", "go-1.json", "plan.json", "workloads/d.py", "node.json")
    manifest = json.dumps({"files": dict.fromkeys(names, "0" * 64)}).encode()
    assert list(files_of(manifest)) == ["node.json", "workloads/d.py", "plan.json", "go-1.json", "done.json"]


def test_content_that_is_not_what_the_manifest_says_is_not_put_in_place(tmp_path: Path) -> None:
    store = Store()
    store.say(plan_json="1", workloads__d_py="w")
    store.files["workloads/d.py"] = b"other"
    inbox = Inbox(tmp_path, store.get)
    assert inbox.fetch() == []
    assert not (tmp_path / "plan.json").exists(), "a plan without its workload"
    store.say()
    assert inbox.fetch() == ["workloads/d.py", "plan.json"]


@pytest.mark.parametrize(
    "name", ["../x", "/etc/x", "a/../../x", "a//b", "", ".x", "a/.x", "node-0/notice.json", "a\\b", "a/b/c/d", "a\n"]
)
def test_a_name_that_leads_elsewhere_refuses_the_manifest(name: str) -> None:
    with pytest.raises(BadManifest, match=r"manifest\.json names"):
        files_of(json.dumps({"files": {"plan.json": "0" * 64, name: "0" * 64}}).encode())


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"files": []}', '{"files": {"plan.json": 3}}', '{"files": {"a": "0"}}']
)
def test_a_manifest_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(BadManifest):
        files_of(text.encode())


@pytest.mark.parametrize(
    "text", ["", "3", "{}", '{"node": "0", "nodes": 1}', '{"node": 2, "nodes": 2}', '{"node": -1, "nodes": 2}']
)
def test_a_place_outside_the_cluster_is_refused(text: str, tmp_path: Path) -> None:
    store = Store()
    store.files["node.json"] = text.encode()
    with pytest.raises(BadManifest):
        Inbox(tmp_path, store.get).rank()
    store.files["node.json"] = b'{"node": 1, "nodes": 2}'
    assert Inbox(tmp_path, store.get).rank() == 1


def test_no_link_that_lies_in_wait_is_written_through(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("untouched")
    (tmp_path / "notice.json").symlink_to(victim)
    (tmp_path / ".notice.json.courier").symlink_to(victim)
    place(tmp_path / "notice.json", b"{}")
    assert victim.read_text() == "untouched"
    assert not (tmp_path / "notice.json").is_symlink() and (tmp_path / "notice.json").read_text() == "{}"


def test_a_link_that_comes_back_is_not_written_through_either(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    victim = tmp_path / "victim"
    victim.write_text("untouched")
    (tmp_path / ".notice.json.courier").symlink_to(victim)
    monkeypatch.setattr(Path, "unlink", lambda _: None)
    with pytest.raises(FileExistsError):
        place(tmp_path / "notice.json", b"{}")
    assert victim.read_text() == "untouched"
