"""What travels of a workload, under which digest, and what is refused before anything starts."""

from __future__ import annotations

import io
import os
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from tasks.workspace import sources
from tasks.workspace.settings import Settings, SettingsError, load_settings

TOML = """
[workloads.repo]
path = "repo"
entrypoint = "train.run:build"
samples = 1000
global_batch = 64
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A repository of one package, and its srift.toml beside it."""
    write(tmp_path / "srift.toml", TOML)
    write(tmp_path / "repo" / "train" / "__init__.py", "")
    write(tmp_path / "repo" / "train" / "run.py", "from .net import build\n")
    write(tmp_path / "repo" / "train" / "net.py", "def build(): ...\n")
    return tmp_path


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def state(project: Path, old: str, new: str) -> None:
    text = (project / "srift.toml").read_text()
    assert old in text
    write(project / "srift.toml", text.replace(old, new))


def settings(project: Path) -> Settings:
    return load_settings(project / "srift.toml")


def digest(project: Path) -> str:
    return settings(project).workload_digest("repo")


@pytest.mark.parametrize(
    ("arguments", "digest"), [("", "575c6412d218"), ("arguments = {width = 3}", "87494685c167")]
)
def test_a_workload_of_one_plain_file_keeps_the_digest_that_its_measurements_have(
    project: Path, arguments: str, digest: str
) -> None:
    write(project / "mine.py", "def build(): ...\n")
    state(
        project,
        'path = "repo"\nentrypoint = "train.run:build"',
        f'entrypoint = "mine.py:build"\n{arguments}',
    )
    spec, source = settings(project).travelling("repo")
    assert (spec.digest, spec.file, spec.process_key) == (digest, f"workloads/{digest}.py", ())
    assert source.travels_as(source.read()) == b"def build(): ...\n"


CHANGES: dict[str, Callable[[Path], object]] = {
    "another line in a file that is imported": lambda p: write(
        p / "repo/train/net.py", "def build(): pass\n"
    ),
    "another name": lambda p: (p / "repo/train/net.py").rename(p / "repo/train/net2.py"),
    "a file more": lambda p: write(p / "repo/config.yaml", "width: 3\n"),
    "another function": lambda p: state(p, "run:build", "run:make"),
    "another module": lambda p: state(p, "run:build", "net:build"),
    "an argument": lambda p: state(p, "samples", "arguments = {width = 3}\nsamples"),
    "a variable": lambda p: state(p, "samples", 'env = {WIDTH = "3"}\nsamples'),
}
NO_CHANGES: dict[str, Callable[[Path], object]] = {
    "a later moment": lambda p: os.utime(p / "repo/train/net.py", (1e9, 1e9)),
    "compiled code": lambda p: (
        write(p / "repo/train/__pycache__/net.pyc", ""),
        write(p / "repo/old.pyc", ""),
    ),
    "a hidden file, and folder": lambda p: (
        write(p / "repo/.env", "TOKEN=1"),
        write(p / "repo/.git/HEAD", ""),
    ),
    "a virtual environment": lambda p: (
        write(p / "repo/env/pyvenv.cfg", ""),
        write(p / "repo/env/x.py", ""),
    ),
    "another goal": lambda p: state(p, "samples = 1000", "samples = 2000"),
}


@pytest.mark.parametrize("what", CHANGES)
def test_another_digest_is_another_workload(project: Path, what: str) -> None:
    before = digest(project)
    CHANGES[what](project)
    assert digest(project) != before


@pytest.mark.parametrize("what", NO_CHANGES)
def test_what_is_not_the_workloads_code_does_not_change_it(project: Path, what: str) -> None:
    before = digest(project)
    NO_CHANGES[what](project)
    assert digest(project) == before


def test_the_folder_of_srift_toml_itself_may_be_the_repository(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SRIFT_HOME")
    state(project, 'path = "repo"', 'path = "."')
    state(project, "train.run", "repo.train.run")
    state(project, "[workloads", 'home = "state"\n[workloads')
    before = digest(project)
    write(project / "state" / "warehouse.duckdb", "rows")
    state(project, "samples = 1000", "samples = 2000")
    assert digest(project) == before
    assert set(settings(project).source("repo")[0].files) == {
        f"repo/train/{one}.py" for one in ("__init__", "net", "run")
    }


def test_no_link_leads_out_of_the_folder_and_what_is_left_out_is_said(project: Path) -> None:
    write(project / "secret.txt", "secret")
    (project / "repo/train/inside.txt").symlink_to("net.py")
    (project / "repo/train/outside.txt").symlink_to(project / "secret.txt")
    (project / "repo/images").symlink_to(project)
    source, _ = settings(project).source("repo")
    contents = source.read()
    assert (
        contents["train/inside.txt"] == b"def build(): ...\n" and b"secret" not in contents.values()
    )
    assert [one.partition(" is ")[0] for one in source.left_out] == ["images", "train/outside.txt"]


def test_the_same_code_is_the_same_archive_with_nothing_of_this_disk_in_it(project: Path) -> None:
    spec, source = settings(project).travelling("repo")
    first = source.travels_as(source.read())
    os.utime(project / "repo/train/net.py", (1e9, 1e9))
    (project / "repo/train/net.py").chmod(0o755)
    assert source.travels_as(source.read()) == first and spec.file == f"{spec.folder}.tar.gz"
    with tarfile.open(fileobj=io.BytesIO(first)) as tar:
        assert tar.getnames() == ["train/__init__.py", "train/net.py", "train/run.py"]
        assert {(one.uid, one.uname, one.mtime, one.mode) for one in tar} == {
            (0, "", 315619200, 0o644)
        }


def test_workloads_of_one_repository_share_its_archive_and_a_process(project: Path) -> None:
    wide = TOML.replace("repo]", "wide]") + "arguments = {width = 3}\n"
    write(
        project / "srift.toml",
        TOML + wide + TOML.replace("repo]", "other]") + 'env = {WIDTH = "3"}\n',
    )
    found = [settings(project).travelling(name)[0] for name in ("repo", "wide", "other")]
    assert len({one.file for one in found}) == 1 and len({one.digest for one in found}) == 3
    assert found[0].process_key == found[1].process_key != found[2].process_key


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        (
            'path = "repo"',
            'path = "repos"',
            "workloads.repo.path: no folder .*repos; did you mean 'repo'",
        ),
        ('path = "repo"', 'path = "srift.toml"', "is a file; name its folder"),
        (
            "train.run:",
            "train.rum:",
            "entrypoint: no module 'train.rum' in .*; did you mean 'train.run'",
        ),
        ("train.run:", "train/run.py:", "no module 'train/run.py' in .*; did you mean 'train.run'"),
        (
            "train.run:build",
            "train.run",
            "is not of the form module:function or package.module:function",
        ),
        (
            "samples",
            'requirements = "requirement.txt"\nsamples',
            "no file .*; did you mean 'requirements.txt'",
        ),
        (
            "samples",
            'requirements = "x/needs.txt"\nsamples',
            "no file .*repo/x/needs.txt; create it, or take `req",
        ),
        ("samples", 'requirements = "../srift.toml"\nsamples', "lies outside"),
        (
            "samples",
            'requirements = "finds.txt"\nsamples',
            "finds.txt, line 2: nothing is at .*repo/wheels",
        ),
        (
            "samples",
            'requirements = "leaves.txt"\nsamples',
            "leaves.txt, line 1: ../x.whl lies outside",
        ),
        (
            "samples",
            'requirements = "hides.txt"\nsamples',
            ".wheels/a.whl in .* is of a kind that is not sent",
        ),
        (
            'entrypoint = "train.run:build"',
            "",
            "path is for the code of an entrypoint, and none is stated",
        ),
        ("samples", "env = {WIDTH = 3}\nsamples", "env.WIDTH: text in quotes is wanted"),
        ("samples", 'env = {"A B" = "3"}\nsamples', "'A B' is no variable"),
    ],
)
def test_what_is_missing_or_malformed_is_refused_with_the_nearest_right_name(
    project: Path, old: str, new: str, said: str
) -> None:
    write(project / "repo/requirements.txt", "numpy\n")
    write(project / "repo/finds.txt", "numpy\n-f wheels\n")
    write(project / "repo/leaves.txt", "../x.whl\n")
    write(project / "repo/hides.txt", "--find-links=.wheels\n")
    write(project / "repo/.wheels/a.whl", "")
    state(project, old, new)
    with pytest.raises(SettingsError, match=said):
        settings(project)


@pytest.mark.parametrize(
    "name",
    [
        *(
            "AWS_PROFILE",
            "SRIFT_HOME",
            "PYTHONPATH",
            "LD_PRELOAD",
            "HOME",
            "PATH",
            "MASTER_ADDR",
            "RANK",
        ),
        *(
            "TORCHELASTIC_RUN_ID",
            "GLOO_SOCKET_IFNAME",
            "NCCL_DEBUG",
            "OMP_NUM_THREADS",
            "CUDA_VISIBLE_DEVICES",
        ),
        *(
            "NVIDIA_TF32_OVERRIDE",
            "TORCHDYNAMO_DISABLE",
            "TORCH_COMPILE_DISABLE",
            "TORCHINDUCTOR_MAX_AUTOTUNE",
        ),
        *("OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS", "ACCELERATE_MIXED_PRECISION"),
    ],
)
def test_variables_that_are_the_machines_are_refused_with_a_reason(
    project: Path, name: str
) -> None:
    state(project, "samples", f'env = {{{name} = "1", WIDTH = "2"}}\nsamples')
    with pytest.raises(SettingsError, match=rf"workloads.repo.env: {name} cannot be set: \w+"):
        settings(project)


def test_a_module_that_machines_would_take_for_ours_is_refused(project: Path) -> None:
    write(project / "repo/node.py", "")
    with pytest.raises(
        SettingsError, match=r"node.py has the name of the package that runs on machines: rename it"
    ):
        settings(project)


def test_so_is_a_file_alone_that_is_unpacked_beside_its_requirements(tmp_path: Path) -> None:
    write(tmp_path / "node.py", "def build(): ...\n")
    write(tmp_path / "requirements.txt", "numpy\n")
    assert sources.file_source(tmp_path / "node.py", tmp_path, "").entry == "node.py", (
        "travels under its digest"
    )
    with pytest.raises(
        sources.SourceRefused, match=r"node.py has the name of the package .*: rename it"
    ) as refused:
        sources.file_source(tmp_path / "node.py", tmp_path, "requirements.txt")
    assert refused.value.key == "entrypoint"


@pytest.mark.parametrize(("limit", "value"), [("MOST_BYTES", 5000), ("MOST_FILES", 4)])
def test_a_folder_too_large_to_send_is_refused_with_its_largest_entries(
    project: Path, monkeypatch: pytest.MonkeyPatch, limit: str, value: int
) -> None:
    for number in range(3):
        write(project / f"repo/images/{number}.jpg", "x" * 3000)
    monkeypatch.setattr(sources, limit, value)
    with pytest.raises(
        SettingsError, match=r"the largest: images/ \(0.0 MiB in [23]\).*Name data as `data`"
    ):
        settings(project)


def test_a_requirements_file_brings_all_that_it_names_and_only_that_decides_what_is_installed(
    project: Path,
) -> None:
    repo = project / "repo"
    write(
        repo / "deps/requirements.txt",
        "-r more.txt\n--constraint=held.txt\n-f wheels # offline\n./local[extra]\nnumpy\n",
    )
    write(
        repo / "deps/more.txt",
        "wheels/b.whl ; python_version > '3'\nc @ https://host/c.whl\n--index-url https://host\n",
    )
    for name in (
        "deps/held.txt",
        "deps/wheels/a.whl",
        "wheels/b.whl",
        "local/setup.py",
        "local/x/__init__.py",
    ):
        write(repo / name, name)
    state(project, "samples", 'requirements = "deps/requirements.txt"\nsamples')
    spec, source = settings(project).travelling("repo")
    named = {f"deps/{one}" for one in ("requirements.txt", "more.txt", "held.txt", "wheels/a.whl")}
    assert set(source.needed) == named | {"wheels/b.whl", "local/setup.py", "local/x/__init__.py"}
    assert (spec.requirements, len(spec.requirements_digest)) == ("deps/requirements.txt", 12)
    write(repo / "train/net.py", "another")
    other = settings(project).travelling("repo")[0]
    assert other.digest != spec.digest and other.requirements_digest == spec.requirements_digest
    write(repo / "wheels/b.whl", "another")
    assert settings(project).travelling("repo")[0].requirements_digest != spec.requirements_digest


def test_a_plain_file_with_requirements_travels_with_them_and_nothing_else(project: Path) -> None:
    write(project / "jobs/mine.py", "def build(): ...\n")
    write(project / "requirements.txt", "--find-links wheels\na\n")
    write(project / "wheels/a.whl", "a")
    stated = 'entrypoint = "jobs/mine.py:build"\nrequirements = "requirements.txt"'
    state(project, 'path = "repo"\nentrypoint = "train.run:build"', stated)
    spec, source = settings(project).travelling("repo")
    assert set(source.files) == {"mine.py", "requirements.txt", "wheels/a.whl"}
    assert (spec.source, spec.module, bool(spec.folder)) == ("mine.py", "", True)
