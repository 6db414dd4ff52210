"""Install a workload's requirements into a virtual environment that uses this node's torch.

The environment also sees all packages of the Python that creates it. pip adds the missing packages
and keeps the version of torch. An environment is created once for each combination of requirements,
Python and torch, by one process at a time. This module imports only the standard library.
"""

import fcntl
import hashlib
import os
import re
import shutil
import signal
import site
import subprocess
import sys
import tarfile
import tempfile
import venv
from collections.abc import Callable
from importlib.metadata import version
from io import BytesIO
from pathlib import Path

from .processes import die_with_parent

INSTALL_S = 300.0  # time limit of an installation; equals Plan.prepare_s if nodes install
_MARKER = "complete.json"
# Environment variables that pip gets, such as PATH and the package index. Values with a
# password are left out, because pip runs code of packages.
_CARRIED = re.compile(
    "PATH|LANG|LC_ALL|LD_LIBRARY_PATH|SSL_CERT_FILE|SSL_CERT_DIR|REQUESTS_CA_BUNDLE|PIP_[A-Z_]+|"
    "(?:http|https|no)_proxy|(?:HTTP|HTTPS|NO)_PROXY"
)
_PASSWORD = re.compile(r"://[^/\s]*@")
_MOST_WORDS = 600  # maximum number of characters of pip's output in a message
# A line of a requirements file that runs no code of a package: a name with a version, a wheel, or
# one option about the index. Nothing may follow on the line, because pip would read more options.
_PLAIN = re.compile(
    r"""(?!\S+\.(zip|tar|tgz|tbz|txz|tlz|tar\.\w+)\b)
        \w[\w.-]*\s*(\[[^]]*\]\s*)?([<>=!~;(](?!.*\s-).*)?
    | ([\w.-]+\s*@\s*)?(https?://\S+|[^-\s:][^\s:]*)\.whl(\#\S*)?
    | (-i|-f|--index-url|--extra-index-url|--find-links|--trusted-host)
        [\s=]\s*[^-\s'"\\][^\s'"\\]*
    | --no-index | --pre | --prefer-binary | --require-hashes""",
    re.VERBOSE | re.IGNORECASE,
)
_UNREACHED = "connection broken by"  # pip prints these words if an index does not respond


class NotInstalled(Exception):
    """The requirements cannot be installed."""


class InstallationInterrupted(NotInstalled):
    """The installation failed because of the network or the time limit, so a retry may help."""


def unpack(archive: bytes, folder: Path) -> None:
    """Unpack a .tar.gz into `folder`, and overwrite the files of an earlier attempt.

    Raises OSError if the archive cannot be unpacked, or if a path leads out of `folder`. Also
    raises OSError if an entry, such as a link, is not a regular file.
    """
    try:
        with tarfile.open(fileobj=BytesIO(archive), mode="r:gz") as tar:
            for member in tar:
                path = Path(member.name)
                held = tar.extractfile(member) if member.isreg() else None
                if held is None or path.is_absolute() or ".." in path.parts:
                    raise OSError(f"the code archive must not contain {member.name}")
                (folder / path).parent.mkdir(parents=True, exist_ok=True)
                (folder / path).write_bytes(held.read())
    except (tarfile.TarError, EOFError) as error:
        raise OSError(f"the code archive could not be unpacked: {error}") from None


def environment_of(environments: Path, digest: str) -> Path:
    """Return the folder of the virtual environment for given requirements.

    The name of the folder also depends on this Python and its version of torch.

    environments: the parent folder of all virtual environments.
    digest: the hash of the requirements.
    """
    key = "\0".join([digest, sys.version, sys.prefix, version("torch"), *_packages()])
    return environments / hashlib.sha256(key.encode()).hexdigest()[:12]


def is_ready(environment: Path) -> bool:
    """Return True if all requirements have been installed into `environment`."""
    return (environment / _MARKER).is_file()


def install(
    requirements: str,
    root: Path,
    environment: Path,
    workload: str,
    builds: bool = True,
    confine: Callable[..., list[str]] = list,
) -> str:
    """Create `environment` if it is not complete, and return the path of its Python.

    While another process creates the environment, this function waits.

    requirements: the path of a requirements file relative to `root`.
    root: the folder in which pip runs.
    workload: the workload's name for messages.
    builds: True to permit source builds, which run code of the package. False permits only wheels.
    confine: maps pip's command to a command that runs pip with fewer rights.

    Raises NotInstalled if pip fails, takes longer than INSTALL_S seconds, or would have to build a
    package. The error is InstallationInterrupted if a retry may help.
    """
    failed = f"requirements of workload {workload} could not be installed"
    if not builds:
        failed += " from wheels alone (`allow_builds = true` also permits source builds)"
    environment.parent.mkdir(parents=True, exist_ok=True)
    python = str(environment / "bin" / "python")
    with environment.with_name(f".{environment.name}.lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # the kernel frees the lock of a process that dies
        if not is_ready(environment):
            for line in () if builds else lines_of(root / requirements):
                if not is_plain(line, root):
                    raise NotInstalled(
                        f"{failed}: the line {line!r} may make pip run code of a package"
                    )
            _create(environment)
            pip = [python, "-I", "-m", "pip", "install", "--no-input"]
            pip += ["--disable-pip-version-check", "--requirement", requirements]
            pip += [f"torch=={version('torch')}", *(() if builds else ("--only-binary=:all:",))]
            with tempfile.TemporaryDirectory(prefix="srift-pip-", dir=environment) as scratch:
                code, output = _run(confine(pip), root, scratch)
            if code is None:
                raise InstallationInterrupted(f"{failed} within {INSTALL_S:.0f} s")
            if code:
                words = " ".join(output.split())[-_MOST_WORDS:]
                kind = InstallationInterrupted if _UNREACHED in output else NotInstalled
                raise kind(f"{failed}: {words}")
        # the modification time shows when the environment was last used
        (environment / _MARKER).touch()
    return python


def lines_of(requirements: Path) -> list[str]:
    """Return the lines of a requirements file as pip reads them.

    Comments, `--hash` options and empty lines are left out.
    """
    lines = requirements.read_text(errors="replace").splitlines()
    # a backslash continues a line, but not a comment
    text = "\n".join("" if line.lstrip().startswith("#") else line for line in lines)
    joined = text.replace("\\\n", " ").split("\n")
    bare = (re.sub(r"\s#.*|\s--hash=[\w:]+", "", line).strip() for line in joined)
    return [line for line in bare if line]


def is_plain(line: str, root: Path) -> bool:
    """Return True if pip runs no code of a package when it processes `line`.

    pip gets the option --only-binary=:all:, but some lines make pip run a package's code even so.

    line: a line of a requirements file.
    root: the folder in which pip runs.
    """
    wheel = root / line.rpartition("@")[2].strip()
    is_folder = wheel.suffix.lower() == ".whl" and wheel.is_dir()
    return bool(_PLAIN.fullmatch(line)) and not is_folder


def _create(environment: Path) -> None:
    """Create an environment that has no pip and can import this Python's packages."""
    shutil.rmtree(environment, ignore_errors=True)  # left over from a failed installation
    venv.create(environment, symlinks=True)
    packages = next(environment.glob("lib/python*/site-packages"))
    lines = [f"import site; site.addsitedir({folder!r})\n" for folder in _packages()]
    (packages / "srift-node.pth").write_text("".join(lines))


def _run(command: list[str], root: Path, scratch: str) -> tuple[int | None, str]:
    """Run a command in the folder `root`, and return its exit code and its output.

    After INSTALL_S seconds, kill the command and its children, and return (None, "").

    scratch: a folder that serves the command as HOME and TMPDIR.
    """
    environment = _pip_env() | {"HOME": scratch, "TMPDIR": scratch, "PYTHONDONTWRITEBYTECODE": "1"}
    with subprocess.Popen(
        command,
        cwd=root,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
        preexec_fn=die_with_parent,
    ) as process:
        try:
            output, _ = process.communicate(timeout=INSTALL_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            return None, ""
    return process.returncode, output


def readable() -> list[str]:
    """Return the paths that pip must be able to read.

    These are Python's folders and the values of pip's environment variables, such as the path of
    certificates. Values that are not paths are not removed.
    """
    return [sys.base_prefix, *_packages(), *_pip_env().values()]


def _pip_env() -> dict[str, str]:
    return {
        name: value
        for name, value in os.environ.items()
        if _CARRIED.fullmatch(name) and not _PASSWORD.search(value)
    }


def _packages() -> list[str]:
    """Return the folders from which this Python imports packages."""
    return [folder for folder in site.getsitepackages() if Path(folder).is_dir()]
