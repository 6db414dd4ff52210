"""Requirements beside the node's own packages: real pip on wheels that are made here, without an index."""

from __future__ import annotations

import importlib.util
import io
import re
import subprocess
import sys
import tarfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest

from tasks.node import requirements
from tasks.node.machine import torch_version
from tasks.node.requirements import NotInstalled, environment_of, install, installed, unpack
from tests.wheels import wheel

TORCH = torch_version().partition("+")[0]


def asked(root: Path, text: str) -> str:
    """Install that, and return the environment's Python."""
    (root / "requirements.txt").write_text(f"--no-index\n--find-links wheels\n{text}\n")
    return install("requirements.txt", root, environment_of(root / "environments", "d1"), "mine")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A folder with wheels: one that is content, one that takes no torch of today, two that quarrel."""
    wheels = tmp_path / "wheels"
    wheel(wheels, "greeting", "1.0", "WORD = 'hello'\n")
    wheel(wheels, "ancient", "1.0", "", "torch<2")
    wheel(wheels, "torch", "1.13.0", "__version__ = '1.13.0'\n")
    wheel(wheels, "torch", f"{TORCH}+other", "")  # that version too, built otherwise
    wheel(wheels, "quarrel", "1.0", "", "greeting>=2")
    return tmp_path


def test_what_is_installed_stands_beside_the_nodes_own_torch_and_is_made_once(root: Path) -> None:
    python = asked(root, "greeting")
    script = (
        "import greeting, importlib.util, importlib.metadata\n"
        "print(greeting.WORD, importlib.metadata.version('torch'), importlib.util.find_spec('torch').origin)"
    )
    said = subprocess.run(
        [python, "-c", script], capture_output=True, text=True, check=True
    ).stdout.split()
    own = importlib.util.find_spec("torch")
    assert own is not None and said == ["hello", torch_version(), own.origin]
    (root / "wheels" / "greeting-1.0-py3-none-any.whl").unlink()
    assert asked(root, "greeting") == python


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "ancient",
            f"clash with torch {TORCH}, which the machines have: ancient 1.0 depends on torch<2",
        ),
        ("torch<2", f"clash with torch {TORCH}, which the machines have: torch<2"),
        (
            "./wheels/torch-1.13.0-py3-none-any.whl",
            f"clash with torch {TORCH}, which the machines have: torch 1.13.0 ",
        ),
        (
            f"torch=={TORCH}+other",
            f"clash with torch {TORCH}, which the machines have: they bring torch {TORCH}+other",
        ),
        ("quarrel\ngreeting==1.0", "clash with each other: "),
        (
            "nosuch==3",
            "could not be installed: Could not find a version that satisfies the requirement nosuch==3",
        ),
        (
            "one two",
            "could not be installed: Invalid requirement: 'one two' (from line 3 of requirements.txt)",
        ),
    ],
)
def test_why_not_is_one_sentence_in_pips_words_and_nothing_half_made_is_left(
    root: Path, text: str, said: str
) -> None:
    with pytest.raises(NotInstalled) as refused:
        asked(root, text)
    message = str(refused.value)
    assert message.startswith(f"requirements of workload mine {said}") and "\n" not in message, (
        message
    )
    assert installed(environment_of(root / "environments", "d1")) is None


def test_one_that_was_left_half_made_is_made_anew(root: Path) -> None:
    environment = environment_of(root / "environments", "d1")
    (environment / "bin").mkdir(parents=True)
    (environment / "bin" / "python").write_text("#!/bin/sh\n")
    assert installed(environment) is None
    python = asked(root, "greeting")
    assert subprocess.run([python, "-c", "import greeting"]).returncode == 0


def test_two_that_ask_at_once_make_it_once(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    whole = requirements._make
    monkeypatch.setattr(requirements, "_make", lambda *words: (made.append(words), whole(*words)))
    with ThreadPoolExecutor(2) as threads:
        found = list(threads.map(asked, [root] * 2, ["greeting"] * 2))
    assert found[0] == found[1] and len(made) == 1


def test_another_torch_or_python_has_another_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = environment_of(tmp_path, "d1")
    assert environment_of(tmp_path, "d2") != first == environment_of(tmp_path, "d1")
    monkeypatch.setattr(requirements, "torch_version", lambda: "1.0")
    assert environment_of(tmp_path, "d1") != first


def test_pip_sees_where_its_index_is_and_no_credentials(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "leaks")
    monkeypatch.setenv("PIP_INDEX_URL", "https://me:leaks@host/simple")
    monkeypatch.setenv("PIP_EXTRA_INDEX_URL", "https://host/simple")
    code, said = requirements._run(["/usr/bin/env"], tmp_path, tmp_path / "scratch")
    assert code == 0 and "leaks" not in said
    assert "PIP_EXTRA_INDEX_URL=https://host/simple" in said and f"HOME={tmp_path}/scratch" in said
    assert "PIP_INDEX_URL did not count" in requirements._without_passwords()


def test_what_takes_too_long_is_ended_with_all_that_it_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(requirements, "INSTALL_S", 0.5)
    started = time.monotonic()
    script = f"sleep 60 & echo $! > {tmp_path}/child; wait"
    assert requirements._run(["/bin/sh", "-c", script], tmp_path, tmp_path) == (None, "")
    assert time.monotonic() - started < 30.0
    child = (tmp_path / "child").read_text().strip()
    until = time.monotonic() + 10.0
    with suppress(OSError):  # it is gone
        while Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
            assert time.monotonic() < until, (
                "the child lives on"
            )  # a busy processor comes to it a moment later
            time.sleep(0.05)


# What pip 23.2 said, shortened.
NO_COMPILER = """
  error: subprocess-exited-with-error
  × Building wheel for cext (pyproject.toml) did not run successfully.
      building 'cext' extension
      error: [Errno 2] No such file or directory: 'gcc'
  note: This error originates from a subprocess, and is likely not a problem with pip.
  ERROR: Failed building wheel for cext
ERROR: Could not build wheels for cext, which is required to install pyproject.toml-based projects
"""
NO_CUDA = """
error: subprocess-exited-with-error
× Getting requirements to build wheel did not run successfully.
      File "<string>", line 1, in <module>
      RuntimeError: no CUDA here
note: This error originates from a subprocess, and is likely not a problem with pip.
"""
NO_INDEX = """
WARNING: Retrying (Retry(total=4)) after connection broken by 'NewConnectionError(...)': /simple/numpy/
ERROR: Could not find a version that satisfies the requirement numpy (from versions: none)
ERROR: No matching distribution found for numpy
"""
NO_SPACE = "Collecting a\nERROR: Could not install packages due to an OSError: [Errno 28] No space left on device\n"


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        (
            NO_COMPILER,
            "Could not build wheels for cext, .* \\(error: .* 'gcc'\\); a wheel for this Python needs no buil",
        ),
        (
            NO_CUDA,
            "Getting requirements to build wheel did not run successfully. \\(RuntimeError: no CUDA here\\); a w",
        ),
        (
            NO_INDEX,
            "Could not find .* numpy \\(from versions: none\\); the index could not be reached$",
        ),
        (
            NO_SPACE,
            "Could not install packages due to an OSError: \\[Errno 28\\] No space left on device$",
        ),
        ("", "nothing was said$"),
    ],
)
def test_builds_indexes_and_disks_that_fail_are_named(said: str, reason: str) -> None:
    message = requirements._reason(said, "2.13.0", "requirements of workload mine")
    assert re.match(f"requirements of workload mine could not be installed: {reason}", message), (
        message
    )


@pytest.mark.parametrize(
    ("code", "said", "passing"), [(1, NO_INDEX, True), (None, "", True), (1, NO_COMPILER, False)]
)
def test_no_index_or_no_time_may_be_otherwise_another_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int | None, said: str, passing: bool
) -> None:
    run = requirements._run
    monkeypatch.setattr(
        requirements,
        "_run",
        lambda command, *more: (code, said) if "install" in command else run(command, *more),
    )
    with pytest.raises(NotInstalled) as raised:
        install("requirements.txt", tmp_path, tmp_path / "environments" / "e", "mine")
    assert raised.value.passing is passing


def packed(*members: tarfile.TarInfo) -> bytes:
    held = io.BytesIO()
    with tarfile.open(fileobj=held, mode="w:gz") as tar:
        for member in members:
            tar.addfile(member, io.BytesIO(b"x" * member.size))
    return held.getvalue()


def member(name: str, kind: bytes = tarfile.REGTYPE, to: str = "") -> tarfile.TarInfo:
    made = tarfile.TarInfo(name)
    made.type, made.linkname, made.size = kind, to, int(kind == tarfile.REGTYPE)
    return made


@pytest.mark.parametrize(
    "odd",
    [member("../out.py"), member("/tmp/out.py"), member("a/../../out.py"), member("l", tarfile.SYMTYPE, "/etc/passwd"),
     member("h", tarfile.LNKTYPE, "/etc/passwd"), member("p", tarfile.FIFOTYPE)],
)  # fmt: skip
def test_an_archive_that_leads_out_of_its_folder_is_not_unpacked(
    tmp_path: Path, odd: tarfile.TarInfo
) -> None:
    with pytest.raises(OSError, match="which is no file below its folder"):
        unpack(packed(member("a.py"), odd), tmp_path / "in" / "code")
    assert not (tmp_path / "in" / "code").exists() and not (tmp_path / "in" / "out.py").exists()
    assert not (tmp_path / "out.py").exists()


def test_a_torn_archive_is_said_and_a_whole_one_unpacked_once(tmp_path: Path) -> None:
    whole = packed(member("a/b.py"))
    with pytest.raises(OSError, match="could not be unpacked"):
        unpack(whole[:40], tmp_path / "in" / "code")
    unpack(whole, tmp_path / "in" / "code")
    (tmp_path / "in" / "code" / "a" / "b.py").write_text("kept")
    unpack(whole, tmp_path / "in" / "code")
    assert (tmp_path / "in" / "code" / "a" / "b.py").read_text() == "kept"


def test_looking_for_pip_leaves_distutils_to_those_who_compile() -> None:
    code = "from tasks.node import requirements; assert requirements._pip(); import setuptools"
    subprocess.run([sys.executable, "-c", code], check=True)
