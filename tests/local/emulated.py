"""Whether this machine can hold an emulated EC2."""

from __future__ import annotations

import pytest

from tests.world import World

needs_machines = pytest.mark.skipif(bool(World.why_not()), reason=World.why_not())
