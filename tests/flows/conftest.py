import pytest

from tests.installed import DescribedMachines


@pytest.fixture
def described_machines(clean_environment, monkeypatch):
    """The local provider's machines are only described."""
    machines = "tasks.providers.local.provider.LocalProvider"
    monkeypatch.setattr(machines, lambda *_, **__: DescribedMachines())
