"""Requirements beside the node's own packages: real pip on wheels that are made here, without an index."""

import importlib.util
import io
import subprocess
import tarfile
import time
from importlib.metadata import version

import pytest

from tasks.node import requirements
from tasks.node.requirements import NotInstalled, environment_of, install, is_ready, unpack
from tests.wheels import wheel

TORCH = version("torch").partition("+")[0]


def python_with(root, text, **more):
    """Install that, and return the environment's Python."""
    (root / "requirements.txt").write_text(f"--no-index\n--find-links wheels\n{text}\n")
    environment = environment_of(root / "environments", "d1")
    return install("requirements.txt", root, environment, "mine", **more)


@pytest.fixture
def root(tmp_path):
    """A folder with wheels: one that is content, one that takes no torch of today, two that quarrel."""
    wheels = tmp_path / "wheels"
    wheel(wheels, "greeting", "1.0", "WORD = 'hello'\n")
    wheel(wheels, "ancient", "1.0", "", "torch<2")
    wheel(wheels, "torch", f"{TORCH}+other", "")  # that version too, built otherwise
    wheel(wheels, "quarrel", "1.0", "", "greeting>=2")
    return tmp_path


def test_what_is_installed_stands_beside_the_nodes_own_torch_and_is_made_once(root):
    python = python_with(root, "greeting")
    script = (
        "import greeting, importlib.util, importlib.metadata\n"
        "print(greeting.WORD, importlib.metadata.version('torch'), importlib.util.find_spec('torch').origin)"
    )
    lines = subprocess.run(
        [python, "-c", script], capture_output=True, text=True, check=True
    ).stdout.split()
    node_torch = importlib.util.find_spec("torch")
    assert lines == ["hello", version("torch"), node_torch.origin]
    (root / "wheels" / "greeting-1.0-py3-none-any.whl").unlink()
    assert python_with(root, "greeting") == python


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("# a\n--pre\n./wheels/ancient-1.0-py3-none-any.whl", "ancient 1.0 depends on torch<2"),
        (f"torch=={TORCH}+other", f"torch=={TORCH}+other"),
        ("quarrel\ngreeting[x] ==1.0 ; os_name > ''", "greeting>=2"),
    ],
)
def test_a_failure_is_in_pips_words_and_nothing_half_made_is_left(root, text, named):
    with pytest.raises(NotInstalled) as refused:
        python_with(root, text, builds=False)
    assert named in str(refused.value) and "\n" not in str(refused.value)
    assert not is_ready(environment_of(root / "environments", "d1"))


BUILT = """./sd
sd-1.0.tar.gz
-e .
-r more.txt
--no-binary :all:
--only-binary=:none:
sd @ git+https://host/sd.whl
git+https://host/sd
sd @ https://host/sd-1.0.zip
--pre -e ./unpacked
--pre -r more.txt
--pre '-e' ./unpacked
unpacked-1.0.ZIP
-f wheels --no-binary unpacked
greeting>=1 --no-binary greeting
./wheels
file:///wheels/greeting.whl"""


@pytest.mark.parametrize(
    "text", [*BUILT.split("\n"), "unpacked", "greeting \\\n-e .", "# note \\\n./unpacked"]
)
def test_no_code_of_a_package_runs_unless_builds_are_allowed(root, text):
    with tarfile.open(root / "wheels" / "unpacked-1.0.tar.gz", "w:gz") as tar:
        tar.addfile(member("unpacked-1.0/setup.py"), io.BytesIO(b"1/0"))
    with pytest.raises(NotInstalled, match="allow_builds"):
        python_with(root, text, builds=False)


def test_names_wheels_and_options_of_the_index_run_no_code(tmp_path):
    lines = "numpy>=1,<3 ; python_version > '3' \\\n  --hash=sha256:ab # why\nx[a,b] ==1\n# -e .\n-f wheels"
    lines += "\n--index-url=https://host/simple\nx @ https://host/x-1-py3-none-any.whl\n./w/x.whl\n--pre\n"
    (tmp_path / "some.txt").write_text(lines)
    found = requirements.lines_of(tmp_path / "some.txt")
    assert len(found) == 7 and all(requirements.is_plain(line, tmp_path) for line in found)
    (tmp_path / "w" / "x.whl").mkdir(parents=True)  # pip builds a folder
    assert requirements.is_plain("w", tmp_path)  # but asks the index for a name
    assert not requirements.is_plain("./w/x.whl", tmp_path)


def test_pip_sees_where_its_index_is_and_no_credentials(tmp_path, monkeypatch):
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "leaks")
    monkeypatch.setenv("PIP_INDEX_URL", "https://me:leaks@host/simple")
    monkeypatch.setenv("PIP_EXTRA_INDEX_URL", "https://host/simple")
    code, text = requirements._run(["/usr/bin/env"], tmp_path, f"{tmp_path}/scratch")
    assert code == 0 and "leaks" not in text
    assert "PIP_EXTRA_INDEX_URL=https://host/simple" in text and f"HOME={tmp_path}/scratch" in text


def test_an_installation_that_takes_too_long_is_ended_with_its_children(tmp_path, monkeypatch):
    monkeypatch.setattr(requirements, "INSTALL_S", 0.5)
    # a child that lives on holds the pipe open, so that `_run` would wait for it
    script = ["/bin/sh", "-c", "sleep 60 & wait"]
    started = time.monotonic()
    assert requirements._run(script, tmp_path, str(tmp_path)) == (None, "")
    assert time.monotonic() - started < 30.0


NO_INDEX = "WARNING: Retrying (Retry(total=4)) after connection broken by 'NewConnectionError(...)'"


@pytest.mark.parametrize(
    ("code", "output", "passing"), [(1, NO_INDEX, True), (None, "", True), (1, "ERROR: x", False)]
)
def test_no_index_or_no_time_may_pass(tmp_path, monkeypatch, code, output, passing):
    monkeypatch.setattr(requirements, "_run", lambda *_: (code, output))
    with pytest.raises(NotInstalled) as raised:
        install("requirements.txt", tmp_path, tmp_path / "e" / "e", "mine")
    assert isinstance(raised.value, requirements.InstallationInterrupted) is passing


def packed(*members):
    held = io.BytesIO()
    with tarfile.open(fileobj=held, mode="w:gz") as tar:
        for member in members:
            tar.addfile(member, io.BytesIO(b"x" * member.size))
    return held.getvalue()


def member(name, kind=tarfile.REGTYPE, to=""):
    made = tarfile.TarInfo(name)
    made.type, made.linkname, made.size = kind, to, int(kind == tarfile.REGTYPE)
    return made


@pytest.mark.parametrize(
    "odd",
    [
        member("a/../../out.py"),
        member("/out.py"),
        member("l", tarfile.SYMTYPE, "/etc/passwd"),
        member("h", tarfile.LNKTYPE, "/etc/passwd"),
        member("p", tarfile.FIFOTYPE),
    ],
)
def test_an_archive_that_leads_out_of_its_folder_or_is_torn_is_not_unpacked(tmp_path, odd):
    for content in (packed(member("a.py"), odd), packed(member("a.py"))[:40]):
        with pytest.raises(OSError):
            unpack(content, tmp_path / "in" / "code")
    assert not list(tmp_path.glob("**/out.py"))
