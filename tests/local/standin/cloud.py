"""Stands in for what a machine reaches of AWS: `cloud.py FOLDER ADDRESS:PORT...`.

Objects are files under FOLDER, without signatures, which moto checks elsewhere. Values of the
metadata service are files under FOLDER/meta-data; they need the token.
"""

import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote

TOKEN = "a-token"
FOLDER = Path(sys.argv[1])


class Cloud(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def answer(self, status, body=b""):
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("ETag", '"same"')
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def do_PUT(self):
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.path == "/latest/api/token":
            return self.answer(200, TOKEN.encode())
        path = FOLDER / unquote(self.path).lstrip("/")
        path.parent.mkdir(parents=True, exist_ok=True)
        beside = path.with_name(f".{path.name}")
        beside.write_bytes(body)
        beside.rename(path)
        return self.answer(200)

    def do_GET(self):
        path = unquote(self.path)
        if path.startswith("/latest/") and self.headers.get("X-aws-ec2-metadata-token") != TOKEN:
            return self.answer(401)
        file = FOLDER / path.removeprefix("/latest").strip("/")
        file = file / ".list" if file.is_dir() else file
        if not file.is_file():
            return self.answer(404, b"<Error><Code>NoSuchKey</Code><Message>none</Message></Error>")
        return self.answer(200, file.read_bytes())

    do_HEAD = do_GET

    def log_message(self, *_):
        pass


for address in sys.argv[2:]:
    host, _, port = address.rpartition(":")
    server = ThreadingHTTPServer((host, int(port)), Cloud)
    threading.Thread(target=server.serve_forever).start()
print("ready", flush=True)
