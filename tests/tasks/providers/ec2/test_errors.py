"""AWS's refusals become sentences; what AWS said itself is not repeated."""

from __future__ import annotations

import pytest
from botocore import exceptions, parsers
from botocore.exceptions import ClientError, EndpointConnectionError, NoCredentialsError

from tasks.providers.base import NotSupported
from tasks.providers.ec2.errors import ANOTHER_TRY, FINAL, SENTENCES, explained, fleet_refused


def client_error(code: str) -> ClientError:
    return ClientError(
        {"Error": {"Code": code, "Message": "token=abc123 arn:aws:iam::1:user/x"}}, "DescribeThings"
    )


def test_every_code_gives_a_sentence_with_action_place_or_fix_and_without_aws_words() -> None:
    for code in (*SENTENCES, "NeverHeardOf"):
        error = explained(client_error(code), action="ec2:DescribeThings", region="us-east-1")
        assert str(error).endswith(f"({code})") and "{" not in str(error)
        assert "abc123" not in str(error) and "arn:" not in str(error)
        assert isinstance(error, NotSupported) == (code in FINAL), (
            "what trying again never mends is distinguished"
        )
        fleet = fleet_refused([code], region="us-east-1")
        assert fleet.kind in (*ANOTHER_TRY, "capacity", "quota", "price", "final", "there", "busy")


def test_what_botocore_raises_itself_is_known_by_its_name() -> None:
    assert explained(NoCredentialsError(), action="a", region="r").code == "NoCredentialsError"
    unreachable = explained(
        EndpointConnectionError(endpoint_url="https://x"), action="ec2:D", region="us-esat-1"
    )
    assert "us-esat-1" in str(unreachable) and "region" in str(unreachable)
    ours = [name for name in SENTENCES if name.endswith("Error") and "InternalError" not in name]
    for name in ours:
        assert hasattr(exceptions, name) or hasattr(parsers, name), f"botocore has no {name}"


KINDS = {
    "capacity": "InsufficientInstanceCapacity MaxFleetCountExceeded InsufficientVolumeCapacity Unsupported "
    "InsufficientAddressCapacity InsufficientFreeAddressesInSubnet UnfulfillableCapacity ReservationCapacityExceeded",
    "quota": "VcpuLimitExceeded MaxSpotInstanceCountExceeded MaxIOPSLimitExceeded",
    "price": "SpotMaxPriceTooLow",
    "throttled": "RequestLimitExceeded SlowDown",
    "unsure": "InternalError",
    "gone": "InvalidInstanceID.NotFound",
    "there": "InvalidGroup.Duplicate",
    "busy": "DependencyViolation",
    "final": "UnauthorizedOperation InvalidAMIID.NotFound InvalidBlockDeviceMapping NeverHeardOf",
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_refusal_has_the_kind_by_which_a_launcher_goes_on(kind: str) -> None:
    for code in KINDS[kind].split():
        error = explained(client_error(code), action="ec2:RunInstances", region="us-east-1")
        assert (error.kind, error.code) == (kind, code)


@pytest.mark.parametrize(
    ("codes", "decides"),
    [
        ([], "UnfulfillableCapacity"),
        (["InsufficientInstanceCapacity", "SpotMaxPriceTooLow"], "SpotMaxPriceTooLow"),
        (["InsufficientInstanceCapacity", "RequestLimitExceeded"], "RequestLimitExceeded"),
        (["InternalError", "MaxSpotInstanceCountExceeded"], "MaxSpotInstanceCountExceeded"),
        (
            ["MaxSpotInstanceCountExceeded", "UnauthorizedOperation", "InternalError"],
            "UnauthorizedOperation",
        ),
        (["InsufficientInstanceCapacity", "NeverHeardOf"], "NeverHeardOf"),
        (["MaxFleetCountExceeded"], "MaxFleetCountExceeded"),
    ],
)
def test_of_a_fleets_errors_the_one_decides_that_trying_elsewhere_mends_least(
    codes: list[str], decides: str
) -> None:
    for order in (codes, codes[::-1]):
        assert fleet_refused(order, region="us-east-1").code == decides
