"""Which quota counts a machine: the codes are AWS's own, and a wrong one reads somebody else's room."""

from __future__ import annotations

import pytest

from tasks.providers.ec2_types import quota_of


@pytest.mark.parametrize(("name", "on_demand", "spot"), [
    ("g5.xlarge", "L-DB2E81BA", "L-3819A6DF"), ("g4dn.metal", "L-DB2E81BA", "L-3819A6DF"),
    ("p3.2xlarge", "L-417A185B", "L-7212CCBC"), ("p4d.24xlarge", "L-417A185B", "L-7212CCBC"),
    ("p5.48xlarge", "L-417A185B", "L-C4BD4855"), ("p5en.48xlarge", "L-417A185B", "L-C4BD4855"),
    ("m5.large", "L-1216C47A", "L-34B43A08"), ("unheard.of", None, None),
])  # fmt: skip
def test_each_family_and_market_has_its_quota(name: str, on_demand: str | None, spot: str | None) -> None:
    assert (quota_of(name, "on-demand"), quota_of(name, "spot")) == (on_demand, spot)
