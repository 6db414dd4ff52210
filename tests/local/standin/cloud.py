"""Stands in for what a machine reaches of AWS: `cloud.py FOLDER ADDRESS:PORT...` serves objects and
instance metadata.

Objects are files under FOLDER (no signature is checked: that is botocore's and moto's to say);
values of the metadata service are files under FOLDER/meta-data, given to those who show the token
only.
"""

import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote

TOKEN = "a-token"


class Cloud(BaseHTTPRequestHandler):
    folder: Path
    protocol_version = "HTTP/1.1"

    def answer(self, status: int, body: bytes = b"") -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("ETag", '"same"')
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def do_PUT(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.path == "/latest/api/token":
            return self.answer(200, TOKEN.encode())
        path = self.folder / unquote(self.path).lstrip("/")
        path.parent.mkdir(parents=True, exist_ok=True)
        beside = path.with_name(f".{path.name}")
        beside.write_bytes(body)
        beside.rename(path)
        return self.answer(200)

    def do_GET(self) -> None:
        path = unquote(self.path)
        if path.startswith("/latest/"):
            if self.headers.get("X-aws-ec2-metadata-token") != TOKEN:
                return self.answer(401)
            path = path.removeprefix("/latest")
        file = self.folder / path.strip("/")
        file = file / ".list" if file.is_dir() else file
        if not file.is_file():
            return self.answer(404, b"<Error><Code>NoSuchKey</Code><Message>none</Message></Error>")
        return self.answer(200, file.read_bytes())

    do_HEAD = do_GET

    def log_message(self, *_: object) -> None:
        pass


def serve(folder: Path, *addresses: str) -> list[ThreadingHTTPServer]:
    kind = type("Served", (Cloud,), {"folder": folder})
    servers = []
    for address in addresses:
        host, _, port = address.rpartition(":")
        servers.append(ThreadingHTTPServer((host, int(port)), kind))
        threading.Thread(target=servers[-1].serve_forever, daemon=True).start()
    return servers


if __name__ == "__main__":
    serve(Path(sys.argv[1]), *sys.argv[2:])
    print("ready", flush=True)
    threading.Event().wait()
