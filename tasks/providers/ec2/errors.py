"""Classify AWS error codes by what they mean for a launch.

capacity     no machines are available now; another market may have machines
throttled    AWS received too many requests; boto3 has already retried
unsure       AWS sent no clear response, and may have carried out the request
gone         the resource does not exist, or EC2 does not find it yet
there        the resource to create already exists
busy         the resource to delete is still in use
denied       IAM does not allow the action
credentials  AWS does not accept the credentials
final        every other code
"""

from ..base import ProviderError

NO_CREDENTIALS = (
    "no AWS credentials were found: set AWS_PROFILE or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
)
DENIED = ("UnauthorizedOperation", "AccessDenied", "AccessDeniedException", "403")

# AWS error codes, and names of botocore's exceptions for requests without a response.
_CODES = {
    "capacity": """
        InsufficientInstanceCapacity InsufficientCapacity InsufficientHostCapacity
        InsufficientReservedInstanceCapacity InsufficientFreeAddressesInSubnet UnfulfillableCapacity
        Unsupported InvalidFleetConfiguration InsufficientVolumeCapacity InsufficientAddressCapacity
        ReservationCapacityExceeded Server.InsufficientInstanceCapacity Server.InternalError
        MaxFleetCountExceeded VcpuLimitExceeded InstanceLimitExceeded MaxSpotInstanceCountExceeded
        SpotInstanceCountLimitExceeded VolumeLimitExceeded SecurityGroupLimitExceeded
        Client.VolumeLimitExceeded NetworkInterfaceLimitExceeded PlacementGroupLimitExceeded
        MaxSpotFleetRequestCountExceeded MaxIOPSLimitExceeded SpotMaxPriceTooLow InvalidSpotPrice
    """,
    "throttled": """
        RequestLimitExceeded Throttling ThrottlingException RequestThrottled SlowDown
        TooManyRequestsException BandwidthLimitExceeded
    """,
    "unsure": """
        EndpointConnectionError ConnectTimeoutError ReadTimeoutError ConnectionClosedError
        ProxyConnectionError SSLError IncompleteReadError ResponseStreamingError HTTPClientError
        InternalError InternalErrorException ServiceUnavailable Unavailable InternalFailure
        ServerInternal ServiceException RequestTimeout 500 502 503 504 ResponseParserError
    """,
    "gone": """
        InvalidInstanceID.NotFound InvalidInstanceID.Malformed NoSuchKey 404
        InvalidPlacementGroup.Unknown InvalidGroup.NotFound InvalidGroupId.Malformed
        InvalidLaunchTemplateName.NotFoundException InvalidLaunchTemplateId.NotFound
        InvalidPermission.NotFound NoSuchResourceException
    """,
    "there": """
        InvalidPlacementGroup.Duplicate InvalidGroup.Duplicate InvalidPermission.Duplicate
        InvalidLaunchTemplateName.AlreadyExistsException
    """,
    "busy": "InvalidPlacementGroup.InUse DependencyViolation InvalidGroup.InUse",
    "denied": " ".join(DENIED),
    "credentials": """
        AuthFailure InvalidClientTokenId UnrecognizedClientException SignatureDoesNotMatch
        IncompleteSignature MissingAuthenticationToken InvalidAccessKeyId NotAuthorized
        NoCredentialsError PartialCredentialsError CredentialRetrievalError ExpiredToken
        ExpiredTokenException RequestExpired UnauthorizedSSOTokenError SSOTokenLoadError
        TokenRetrievalError ProfileNotFound
    """,
}
_KINDS = {code: kind for kind, codes in _CODES.items() for code in codes.split()}
_HINTS = {
    "throttled": "try again in a few minutes",
    "unsure": "check the network and [ec2] regions, and try again in a few minutes",
    "denied": "add this action to your IAM policy (`srift doctor --print-policies` prints it)",
    "credentials": "set AWS_PROFILE or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or sign in "
    "again (`aws sso login`)",
}
_SETTINGS = {
    "OptInRequired": "regions",
    "PendingVerification": "regions",
    "InvalidAMIID.NotFound": "ami_parameter",
    "InvalidAMIID.Unavailable": "ami_parameter",
    "InvalidAMIID.Malformed": "ami_parameter",
    "ParameterNotFound": "ami_parameter",
    "InvalidSubnetID.NotFound": "subnet_ids",
    "InvalidSubnet": "subnet_ids",
    "NoSuchEntity": "instance_profile",
    "NoSuchBucket": "bucket",
    "PermanentRedirect": "bucket",
}


class AwsRefused(ProviderError):
    """AWS refused a request or did not respond.

    code: AWS's error code, or the name of botocore's exception.
    kind: what the code means for a launch. The docstring of this module lists the kinds.

    The message omits AWS's message, which may quote a secret.
    """

    def __init__(self, code: str, action: str, region: str) -> None:
        self.code, self.kind = code, _KINDS.get(code, "final")
        hint = _HINTS.get(self.kind, "")
        if code in _SETTINGS:
            hint = f"check [ec2] {_SETTINGS[code]}"
        super().__init__(f"AWS refused {action} in {region} ({code})" + (hint and f": {hint}"))


def code_of(error: Exception) -> str:
    """Return the error code of a botocore exception, or its class name if it has no code."""
    answer = getattr(error, "response", None) or {}
    return str(answer.get("Error", {}).get("Code") or type(error).__name__)
