"""Every test has its state in a folder of the session, no telemetry and no network.

Set when this file is read, because Prefect looks at its environment once, at import.
"""

import atexit
import gc
import os
import shutil
import signal
import tempfile
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from hypothesis import settings

from tests.lanes import Lanes, order_of
from warehouse.database import NO_DOWNLOADS

gc.disable()  # imported objects stay; searching them doubles the time of collection
# How long one example takes depends on what else runs; what it shows does not.
settings.register_profile("srift", deadline=None)
settings.load_profile("srift")

LEFT = []  # processes of an interrupted run
SESSION = Path(tempfile.mkdtemp(prefix="srift-tests-"))
atexit.register(shutil.rmtree, SESSION, ignore_errors=True)

os.environ.setdefault("PYTEST_RUN_OF_SRIFT", str(SESSION))  # workers of xdist inherit it
for name in [name for name in os.environ if name.startswith(("SRIFT_", "PREFECT_", "MLFLOW_"))]:
    del os.environ[name]
os.environ |= {
    "SRIFT_HOME": f"{SESSION}/srift",
    "PREFECT_HOME": f"{SESSION}/prefect",
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "PREFECT_LOGGING_LEVEL": "CRITICAL",
    # a busy machine takes longer than the default of 20 s
    "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": "120",
    "DO_NOT_TRACK": "1",
    "OPENBLAS_NUM_THREADS": "1",  # threads spin on busy cores
    "OMP_NUM_THREADS": "1",
    "MLFLOW_DISABLE_TELEMETRY": "true",
}


# As with BLAS: DuckDB's threads wait for each other over a handful of rows.
NO_DOWNLOADS["threads"] = 1


def pytest_configure(config):
    """SIGTERM acts as Ctrl-C, so that fixtures clean up first."""
    if not hasattr(config, "workerinput"):  # a worker of xdist is the controller's to end
        signal.signal(signal.SIGTERM, signal.default_int_handler)


def pytest_keyboard_interrupt():
    """Note what runs: of a worker that is killed, hosts and servers would be left behind."""
    LEFT.extend(psutil.Process().children(recursive=True))


def pytest_unconfigure():
    for process in LEFT:
        with suppress(psutil.NoSuchProcess):
            process.kill()


def pytest_collection_modifyitems(items):
    """Allow sockets in tests of real hosts."""
    for item in items:
        if item.get_closest_marker("local"):
            item.add_marker(pytest.mark.enable_socket)
    items.sort(key=order_of)


def pytest_collection_finish():
    """What was imported so far is never looked through for garbage; what tests make is."""
    gc.enable()
    gc.freeze()


def pytest_xdist_make_scheduler(config, log):
    """`make test` works in several processes; tests that start hosts are all in one of them."""
    return Lanes(config, log)


@pytest.fixture
def clean_environment():
    """What a command sets for itself, as for Prefect, does not outlive the test."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture
def warehouse(tmp_path):
    """A new warehouse."""
    from tests.warehouse.builders import fresh

    return fresh(tmp_path)


@pytest.fixture
def s3(monkeypatch):
    """A client of an S3 on loopback, which the environment names for other processes too."""
    import boto3
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    server.start()
    host, port = server.get_host_and_port()
    environment = {
        "AWS_ENDPOINT_URL": f"http://{host}:{port}",
        "AWS_ACCESS_KEY_ID": "testing",
        "AWS_SECRET_ACCESS_KEY": "testing",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
    }
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    yield boto3.client("s3")
    server.stop()


@pytest.fixture
def no_credentials(clean_environment, monkeypatch, tmp_path):
    """Neither variables nor files nor a machine's metadata tell of an account of AWS."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_CONFIG_FILE", f"{tmp_path}/none")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", f"{tmp_path}/none")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")


@pytest.fixture
def ec2_project(no_credentials, monkeypatch, tmp_path):
    """A new project on EC2, which is the working directory; its folder."""
    from tests.ec2_home import project

    monkeypatch.setenv("SRIFT_HOME", f"{tmp_path}/state")
    monkeypatch.chdir(tmp_path)
    project(tmp_path)
    return tmp_path


@pytest.fixture
def moto():
    """AWS in memory, by moto, for this process alone."""
    from moto import mock_aws

    with mock_aws():
        yield
