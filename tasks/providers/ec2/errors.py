"""AWS error codes and what they mean for a launch: the only list of codes.

capacity     not to be had here and now; another market may have it
throttled    AWS asks for fewer requests; boto3 has retried already
unsure       no answer came, and the request may have been served
gone         the named thing does not exist, or not yet
there        the thing to create exists already
busy         the thing to delete is still in use
denied       IAM does not allow the action
credentials  AWS does not accept the credentials
final        every other code
"""

from __future__ import annotations

from ..base import ProviderError

NO_CREDENTIALS = (
    "no AWS credentials were found: set AWS_PROFILE or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
)
DENIED = ("UnauthorizedOperation", "AccessDenied", "AccessDeniedException", "403")

# Codes of the API, and names of botocore's exceptions where no answer came.
_CODES = {
    "capacity": "InsufficientInstanceCapacity InsufficientCapacity InsufficientHostCapacity "
    "InsufficientReservedInstanceCapacity InsufficientFreeAddressesInSubnet UnfulfillableCapacity "
    "Unsupported InvalidFleetConfiguration InsufficientVolumeCapacity InsufficientAddressCapacity "
    "ReservationCapacityExceeded Server.InsufficientInstanceCapacity Server.InternalError "
    "MaxFleetCountExceeded VcpuLimitExceeded InstanceLimitExceeded MaxSpotInstanceCountExceeded "
    "SpotInstanceCountLimitExceeded VolumeLimitExceeded SecurityGroupLimitExceeded "
    "Client.VolumeLimitExceeded NetworkInterfaceLimitExceeded PlacementGroupLimitExceeded "
    "MaxSpotFleetRequestCountExceeded MaxIOPSLimitExceeded SpotMaxPriceTooLow InvalidSpotPrice",
    "throttled": "RequestLimitExceeded Throttling ThrottlingException RequestThrottled SlowDown "
    "TooManyRequestsException BandwidthLimitExceeded",
    "unsure": "EndpointConnectionError ConnectTimeoutError ReadTimeoutError ConnectionClosedError "
    "ProxyConnectionError SSLError IncompleteReadError ResponseStreamingError HTTPClientError "
    "InternalError InternalErrorException ServiceUnavailable Unavailable InternalFailure "
    "ServerInternal ServiceException RequestTimeout 500 502 503 504 ResponseParserError",
    "gone": "InvalidInstanceID.NotFound InvalidInstanceID.Malformed NoSuchKey 404 "
    "InvalidPlacementGroup.Unknown InvalidGroup.NotFound InvalidGroupId.Malformed "
    "InvalidLaunchTemplateName.NotFoundException InvalidLaunchTemplateId.NotFound "
    "InvalidPermission.NotFound NoSuchResourceException",
    "there": "InvalidPlacementGroup.Duplicate InvalidGroup.Duplicate InvalidPermission.Duplicate "
    "InvalidLaunchTemplateName.AlreadyExistsException",
    "busy": "InvalidPlacementGroup.InUse DependencyViolation InvalidGroup.InUse",
    "denied": " ".join(DENIED),
    "credentials": "AuthFailure InvalidClientTokenId UnrecognizedClientException "
    "SignatureDoesNotMatch IncompleteSignature MissingAuthenticationToken InvalidAccessKeyId "
    "NotAuthorized NoCredentialsError PartialCredentialsError CredentialRetrievalError "
    "ExpiredToken ExpiredTokenException RequestExpired UnauthorizedSSOTokenError "
    "SSOTokenLoadError TokenRetrievalError ProfileNotFound",
}
_KINDS = {code: kind for kind, codes in _CODES.items() for code in codes.split()}
_HINTS = {
    "throttled": "try again in some minutes",
    "unsure": "check the network and [ec2] regions, and try again in some minutes",
    "denied": "add that action to the identity's IAM policy (`srift doctor --print-policies`)",
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
    """AWS refused or did not answer. `code` is AWS's, `kind` as in the module's docstring.

    The message names the fix. It leaves out AWS's own message, which may quote a secret.
    """

    def __init__(self, code: str, action: str, region: str) -> None:
        self.code, self.kind = code, kind_of(code)
        hint = _HINTS.get(self.kind, "")
        if code in _SETTINGS:
            hint = f"check [ec2] {_SETTINGS[code]}"
        super().__init__(f"AWS refused {action} in {region} ({code})" + (hint and f": {hint}"))


def kind_of(code: str) -> str:
    return _KINDS.get(code, "final")


def code_of(error: Exception) -> str:
    """The code in an exception of botocore, else the exception's name."""
    answer = getattr(error, "response", None)
    code = answer.get("Error", {}).get("Code") if isinstance(answer, dict) else None
    return str(code or type(error).__name__)
