"""A PostgreSQL server of a test, on a Unix socket; skips if PostgreSQL is not installed."""

import os
import pwd
import shutil
import subprocess
import tempfile
from contextlib import closing, contextmanager
from pathlib import Path
from unittest import mock

import pytest

from tasks.doctor.checks import GRANTS

USER = "srift"


def _programs():
    """The folder of initdb and its like: Debian keeps them out of PATH."""
    debian = map(str, sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True))
    found = shutil.which("initdb", path=os.pathsep.join([os.environ["PATH"], *debian]))
    return found and Path(found).resolve().parent


def _as_ordinary_user(folder):
    """PostgreSQL refuses to be run by root."""
    if os.getuid():
        return []
    known = {entry.pw_name: entry for entry in pwd.getpwall()}
    user = known.get("postgres") or known["nobody"]
    os.chown(folder, user.pw_uid, user.pw_gid)
    return ["setpriv", f"--reuid={user.pw_uid}", f"--regid={user.pw_gid}", "--clear-groups"]


@contextmanager
def server():
    """Yield the folder of its socket. PGPASSFILE holds the password it asks for."""
    programs = _programs()
    if programs is None:
        pytest.skip("PostgreSQL is not installed here (Debian's package postgresql)")
    # short: a socket's path has at most 107 bytes
    with tempfile.TemporaryDirectory(prefix="srift-pg-") as name:
        folder = Path(name)
        folder.chmod(0o755)
        who = _as_ordinary_user(folder)

        def run(program, *words):
            line = [*who, programs / program, "--pgdata", folder / "data", *words]
            subprocess.run(line, cwd=folder, check=True, stdout=subprocess.DEVNULL, timeout=120)

        (folder / "password").write_text("not in srift.toml\n")
        passwords = folder / "passwords"
        passwords.touch(mode=0o600)  # libpq heeds no other
        passwords.write_text(f"*:*:*:{USER}:not in srift.toml\n")
        words = f"--auth scram-sha-256 --pwfile {folder}/password --encoding UTF8 --no-sync"
        run("initdb", "--username", USER, *words.split())
        options = f"-k {folder} -c listen_addresses='' -c fsync=off -c max_connections=200"
        run("pg_ctl", "--wait", "--log", folder / "log", "--options", options, "start")
        try:
            with mock.patch.dict(os.environ, {"PGPASSFILE": str(passwords)}):
                yield name
        finally:
            run("pg_ctl", "--wait", "--mode", "immediate", "stop")


def create(socket_folder, database):
    """An empty database."""
    line = [_programs() / "createdb", "--host", socket_folder, "--username", USER, database]
    subprocess.run(line, check=True, timeout=60)


def admit_reader(url, *more):
    """Create srift_reader, which may read the database, then run `more`; the role's address."""
    import psycopg2

    with closing(psycopg2.connect(url)) as owner, owner, owner.cursor() as cursor:
        for line in ("create role srift_reader login password 'x'", GRANTS.read_text(), *more):
            cursor.execute(line)
    return url.replace(f"{USER}@", "srift_reader:x@")
