"""A workload's requirements, installed into a Python environment beside this node's own, whose torch it goes on using.

The environment sees every package of the Python that makes it; pip adds what is missing, with torch held at the version
that is here. It is made once for the same requirements, Python and torch, by one process at a time, and counts as made
only when its marker is there. Standard library.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import shutil
import signal
import site
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.machinery import PathFinder
from itertools import takewhile
from pathlib import Path

from .machine import torch_version
from .processes import die_with_parent

INSTALL_S = 300.0  # most seconds of an installation; Plan.prepare_s where a node makes it
_MARKER = "complete.json"
# Of the environment, what pip finds programs and an index by; what holds a password does not reach packages' own code.
_CARRIED = (
    *(
        "PATH",
        "LANG",
        "LC_ALL",
        "LD_LIBRARY_PATH",
        "SSL_CERT_FILE",
        "SSL_CERT_DIR",
        "REQUESTS_CA_BUNDLE",
    ),
    *(
        "HTTP_PROXY",
        "HTTPS_PROXY",
        "NO_PROXY",
        "http_proxy",
        "https_proxy",
        "no_proxy",
        "PIP_CONFIG_FILE",
    ),
    *(
        "PIP_INDEX_URL",
        "PIP_EXTRA_INDEX_URL",
        "PIP_FIND_LINKS",
        "PIP_NO_INDEX",
        "PIP_CERT",
        "PIP_TRUSTED_HOST",
    ),
    *("PIP_PROXY", "PIP_DEFAULT_TIMEOUT", "PIP_RETRIES"),
)
_PASSWORD = re.compile(r"://[^/\s]*@")
_SAID = 400  # characters of pip's words
# How pip [23 to 25] tells of a conflict, and of what a build failed by.
_CAUSES, _ADVICE, _ASKED = (
    "The conflict is caused by:",
    ("To fix this", "ERROR", "Additionally"),
    "The user requested",
)
_UNREACHED = "connection broken by"  # how it tells of an index that does not answer
_TORCH = re.compile(r"\btorch\b(?!-)")
_BROKEN = re.compile(r"(?:fatal error|error|\w+Error|[^\s:]+:\d+:.*error)\b.*:")


class NotInstalled(Exception):
    """Requirements could not be installed; the message is one sentence, in pip's words where it has some.

    `passing`: the network or the time may be at fault, and another moment may do.
    """

    def __init__(self, sentence: str, *, passing: bool = False) -> None:
        super().__init__(sentence)
        self.passing = passing


def unpack(archive: bytes | Path, folder: Path) -> None:
    """Put the regular files of a tar.gz below `folder`, where there is none yet. Raises OSError, also for odd names.

    Nothing else that a tar may hold is made, and no name leads out of the folder.
    """
    if folder.exists():
        return
    beside = folder.with_name(f".{folder.name}.{os.getpid()}")
    shutil.rmtree(beside, ignore_errors=True)
    try:
        with tempfile.TemporaryFile() if isinstance(archive, bytes) else archive.open("rb") as file:
            if isinstance(archive, bytes):
                file.write(archive)
                file.seek(0)
            with tarfile.open(fileobj=file, mode="r:gz") as tar:
                for member in tar:
                    parts = Path(member.name).parts
                    if (
                        not member.isreg()
                        or not parts
                        or ".." in parts
                        or member.name.startswith("/")
                    ):
                        raise OSError(
                            f"an archive of code holds {member.name!r}, which is no file below its folder"
                        )
                    path, content = beside / member.name, tar.extractfile(member)
                    assert content is not None
                    path.parent.mkdir(parents=True, exist_ok=True)
                    path.write_bytes(content.read())
                    os.utime(path, (member.mtime, member.mtime))
        beside.rename(folder)
    except (tarfile.TarError, EOFError) as error:
        raise OSError(f"an archive of code could not be unpacked: {error}") from None
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def environment_of(environments: Path, digest: str) -> Path:
    """Where requirements of that digest are installed for this Python and its torch."""
    this = [digest, sys.version, sys.prefix, torch_version(), *_own_packages()]
    return environments / hashlib.sha256("\0".join(this).encode()).hexdigest()[:12]


def installed(environment: Path) -> str | None:
    """The Python of an environment that was made to its end; None where none was."""
    return str(environment / "bin" / "python") if (environment / _MARKER).is_file() else None


def install(requirements: str, root: Path, environment: Path, workload: str) -> str:
    """The Python of `environment`, made if it is not there, with `requirements` below `root`, where pip runs.

    Raises NotInstalled with the reason; another process that is making it is waited for.
    """
    environment.parent.mkdir(parents=True, exist_ok=True)
    with _alone(environment):
        python = installed(environment)
        if python is not None:
            os.utime(environment / _MARKER)  # for whoever looks which are in use
            return python
        shutil.rmtree(environment, ignore_errors=True)
        try:
            _make(requirements, root, environment, workload)
        except BaseException:
            shutil.rmtree(environment, ignore_errors=True)
            raise
        marker = {
            "workload": workload,
            "requirements": requirements,
            "torch": torch_version(),
            "python": sys.version,
        }
        (environment / _MARKER).write_text(json.dumps(marker))
        return str(environment / "bin" / "python")


def _make(requirements: str, root: Path, environment: Path, workload: str) -> None:
    of = f"requirements of workload {workload}"
    pip = _pip()
    if pip is None:
        raise NotInstalled(f"{of} could not be installed: {sys.executable} has no pip")
    with tempfile.TemporaryDirectory(prefix="srift-pip-") as scratch:
        made = _run(
            [sys.executable, "-I", "-m", "venv", "--without-pip", str(environment)],
            root,
            Path(scratch),
        )
        if made[0]:
            raise NotInstalled(
                f"{of} could not be installed: no environment could be made: {_last(made[1])}"
            )
        packages = next(environment.glob("lib/python*/site-packages"))
        lines = [f"import site; site.addsitedir({one!r})\n" for one in _own_packages()]
        (packages / "srift-node.pth").write_text("".join(lines))
        torch = torch_version().partition("+")[0]
        command = [
            *(
                str(environment / "bin" / "python"),
                "-I",
                *pip,
                "install",
                "--no-input",
                "--disable-pip-version-check",
            ),
            *("--requirement", requirements),
            *(
                [f"torch=={torch}"] if torch else []
            ),  # it is here: so it stays, and so does what it needs
        ]
        code, said = _run(command, root, Path(scratch))
        own = sorted(packages.glob("torch-*.dist-info"))
        if code is None:
            sentence = f"{of} were not installed within {INSTALL_S:.0f} s, and that was ended: {_last(said)}"
            raise NotInstalled(sentence, passing=True)
        if code:
            raise NotInstalled(
                f"{_reason(said, torch, of)}{_without_passwords()}", passing=_UNREACHED in said
            )
        if torch and own:
            brought = own[0].name.removesuffix(".dist-info").replace("-", " ")
            raise NotInstalled(
                f"{of} clash with torch {torch}, which the machines have: they bring {brought}"
            )


def _run(command: list[str], root: Path, scratch: Path) -> tuple[int | None, str]:
    """Exit code (None: it took too long and was ended, with all that it had started) and what was said."""
    environment = {name: os.environ[name] for name in _CARRIED if name in os.environ}
    environment = {
        name: value for name, value in environment.items() if not _PASSWORD.search(value)
    }
    environment |= {"HOME": str(scratch), "TMPDIR": str(scratch), "PYTHONDONTWRITEBYTECODE": "1"}
    process = subprocess.Popen(
        command,
        cwd=root,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        preexec_fn=die_with_parent,
    )
    try:
        said, _ = process.communicate(timeout=INSTALL_S)
        return process.returncode, said.decode(errors="replace")
    except BaseException as error:
        with suppress(ProcessLookupError):
            os.killpg(
                process.pid, signal.SIGKILL
            )  # not waited for yet: the number is still its own
        said, _ = process.communicate()
        if isinstance(error, subprocess.TimeoutExpired):
            return None, said.decode(errors="replace")
        raise


def _reason(said: str, torch: str, of: str) -> str:
    """One sentence on why pip failed, of all that it said."""
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR: ")]
    if _CAUSES in lines:
        causes = list(
            takewhile(lambda line: not line.startswith(_ADVICE), lines[lines.index(_CAUSES) + 1 :])
        )
        causes = list(dict.fromkeys(causes))
        held = [one for one in causes if torch and one == f"{_ASKED} torch=={torch}"]
        held += [
            one for one in causes if one.startswith(f"{_ASKED} (constraint) torch")
        ]  # of pip's own settings
        clashing = "; ".join(one.removeprefix(f"{_ASKED} ") for one in causes if one not in held)
        if held and _TORCH.search(clashing):
            return f"{of} clash with torch {torch}, which the machines have: {clashing}"
        return f"{of} clash with each other: {clashing}"
    if "subprocess-exited-with-error" in said:
        broken = [
            line
            for line in lines
            if _BROKEN.match(line) and "subprocess-exited-with-error" not in line
        ]
        what = (
            errors[-1:] or [line.removeprefix("× ") for line in lines if line.startswith("× ")][-1:]
        )
        why = " (".join([*what, *broken[-1:]])[:_SAID] + (")" if what and broken else "")
        return f"{of} could not be installed: {why or _last(said)}; a wheel for this Python needs no building"
    if not errors:
        return f"{of} could not be installed: {_last(said)}"
    offline = "; the index could not be reached" if _UNREACHED in said else ""
    return f"{of} could not be installed: {errors[0][:_SAID]}{offline}"


def _last(said: str) -> str:
    return " ".join(said.strip().splitlines()[-1:])[-_SAID:] or "nothing was said"


def _without_passwords() -> str:
    held = [name for name in _CARRIED if _PASSWORD.search(os.environ.get(name, ""))]
    return f" ({' and '.join(held)} did not count, since a password is in it)" if held else ""


def _own_packages() -> list[str]:
    """Folders of the packages that this Python imports."""
    return [one for one in site.getsitepackages() if Path(one).is_dir()]


def _pip() -> list[str] | None:
    """How this Python runs pip: its own, else the one that Python carries to make environments with."""
    # by the path alone: asked for pip, setuptools' finder takes back its distutils, without which nothing is compiled
    if PathFinder.find_spec("pip") is not None:
        return ["-m", "pip"]
    carried = PathFinder.find_spec("ensurepip")
    bundled = sorted(Path(str(carried.origin)).parent.glob("_bundled/pip-*.whl")) if carried else []
    return [f"{bundled[-1]}/pip"] if bundled else None


@contextmanager
def _alone(environment: Path) -> Iterator[None]:
    """Wait until nobody else makes this environment; the kernel lets go of who dies."""
    with environment.with_name(f".{environment.name}.lock").open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
