"""The folders `in/` and `out/` of a machine in the bucket, without S3."""

import hashlib
import json


class Store:
    """Keeps what comes, with the moment. While it is `down` it gives and takes nothing."""

    def __init__(self, clock):
        self.clock = clock
        self.inward = {}
        self.requests = []
        self.came = []
        self.tried = 0
        self.down = False

    def brings(self, **files):
        """The controller's files and the manifest that names all; `__` stands for a dot."""
        self.inward |= {name.replace("__", "."): body.encode() for name, body in files.items()}
        self.inward.pop("manifest.json", None)
        named = {name: hashlib.sha256(body).hexdigest() for name, body in self.inward.items()}
        self.inward["manifest.json"] = json.dumps({"files": named}).encode()

    def get(self, name):
        self.requests.append(name)
        if self.down or name not in self.inward:
            raise OSError(f"no {name}")
        return self.inward[name]

    def put(self, name, content):
        self.tried += 1
        if self.down:
            raise TimeoutError("the store does not answer")
        self.came.append((self.clock.now, name, content))

    def names(self):
        """What came since the last call."""
        names = [name for _, name, _ in self.came]
        self.came.clear()
        return names

    def moments(self, name):
        return [moment for moment, other, _ in self.came if other == name]

    def bodies(self, name):
        return [json.loads(content) for _, other, content in self.came if other == name]
