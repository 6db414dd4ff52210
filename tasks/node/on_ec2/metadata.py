"""Read the machine's identity and interruption notices from EC2's metadata service (IMDSv2).

User-data, the script that EC2 runs at boot, contains a copy of this file. The file therefore needs
only Python 3.10 and its standard library. The environment variable
AWS_EC2_METADATA_SERVICE_ENDPOINT changes the service's address, for example for an emulated EC2.
"""

import http.client
import json
import os
import time
import urllib.request

_TIMEOUT_S = 2.0
_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # without any proxy


class Metadata:
    """A client of this machine's metadata service."""

    def __init__(self) -> None:
        named = os.environ.get("AWS_EC2_METADATA_SERVICE_ENDPOINT")
        self.base = (named or "http://169.254.169.254").rstrip("/")

    def ask(self, method: str, path: str, header: str, value: str) -> str:
        """Send one request to `latest/<path>`, and return the body of the response.

        method: the HTTP method.
        header: the end of the header's name, after "X-aws-ec2-metadata-token". It is "-ttl-seconds"
            in a request for a new token, and "" in a request that sends a token.
        value: the header's value: the new token's lifetime in seconds, or the token to send.

        Raises OSError (for example HTTPError) or HTTPException if the request fails.
        """
        headers = {f"X-aws-ec2-metadata-token{header}": value}
        request = urllib.request.Request(f"{self.base}/latest/{path}", None, headers, method=method)
        with _DIRECT.open(request, timeout=_TIMEOUT_S) as answer:
            return str(answer.read().decode())

    def get(self, path: str) -> str:
        """Return the value at `meta-data/<path>`; "" if the path does not exist.

        Raises OSError if four attempts fail.
        """
        problem: Exception | None = None
        for attempt in range(4):
            if attempt:
                time.sleep(0.2 * 2**attempt)
            token = ""
            try:
                token = self.ask("PUT", "api/token", "-ttl-seconds", "60")
                return self.ask("GET", f"meta-data/{path}", "", token)
            except (OSError, http.client.HTTPException) as error:
                if token and getattr(error, "code", None) == 404:
                    return ""  # with a token, a 404 means that the path does not exist
                problem = error
        raise OSError(f"the metadata service at {self.base} did not return {path}: {problem}")

    def notice(self) -> dict[str, str] | None:
        """Return EC2's interruption notice for this spot machine; None if EC2 has sent no notice.

        The notice has the keys `kind` ("interruption") and `at` (the time in ISO 8601). Raises
        OSError if the service does not respond.
        """
        action = self.get("spot/instance-action")
        return {"kind": "interruption", "at": json.loads(action)["time"]} if action else None
