"""Time how long writing a checkpoint takes, and store the checkpoints of elastic runs."""

import io
import json
import os
import shutil
import tempfile
import time
import zlib
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from .device import now
from .entrypoint import LoadedWorkload
from .record import write_file, write_json

_MOST_BYTES = 4e9  # larger states are not timed, to save rented time
_MOST_OF_FREE = 0.5  # maximum fraction of the free disk that a timed state may use
_KEPT = 2  # number of kept states; the older state is used if the newest state is damaged


def write_checkpoint(built: LoadedWorkload) -> dict[str, Any]:
    """Write the training state to a temporary file on disk, and time how long this takes.

    The result has the keys `checkpoint_bytes` and `checkpoint_s`. If the state is too large or
    cannot be written, `checkpoint_s` is left out.
    """
    state = built.state()
    size = sum(leaf.nbytes for leaf in tree_leaves(state) if isinstance(leaf, torch.Tensor))
    values: dict[str, Any] = {"checkpoint_bytes": size}
    try:
        if size > min(_MOST_BYTES, _MOST_OF_FREE * shutil.disk_usage(tempfile.gettempdir()).free):
            return values
        with tempfile.TemporaryFile(prefix="srift-checkpoint-") as file:
            started = now(built.device)
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
            values["checkpoint_s"] = now(built.device) - started
    except OSError as error:  # a full disk is not the workload's fault
        print(f"the checkpoint could not be timed: {error}", flush=True)
    return values


@dataclass
class Checkpoints:
    """The checkpoints of one training run, in a folder that outlives the machines.

    step-<n>.pt: the training state after step n.
    step-<n>.json: the manifest of the state, with the step, the size in bytes and the checksum.

    States without a matching manifest are ignored. Files are written atomically and never changed.
    """

    folder: Path

    def write(self, step: int, state: dict[str, Any], **more: Any) -> None:
        """Write `state` and its manifest, and delete all states except the newest _KEPT states.

        `more` are further entries for the manifest. Raises OSError if a file cannot be written.
        """
        began, buffer = time.perf_counter(), io.BytesIO()
        path = self.folder / f"step-{step:09d}.pt"
        torch.save(state, buffer)
        content = buffer.getvalue()
        write_file(path, content)
        manifest = {
            "step": step,
            "bytes": len(content),
            "crc32": zlib.crc32(content),
            "seconds": time.perf_counter() - began,
            "ended_unix": time.time(),
        }
        write_json(path.with_suffix(".json"), manifest | more)
        for old in sorted(self.folder.glob("step-*.pt"))[:-_KEPT]:
            old.unlink(missing_ok=True)

    def newest(self, device: torch.device) -> tuple[dict[str, Any], dict[str, Any]] | None:
        """Return (manifest, state) of the newest intact checkpoint, or None.

        The tensors of the state are on `device`.
        """
        for path in sorted(self.folder.glob("step-*.pt"), reverse=True):
            with suppress(OSError, ValueError, KeyError, TypeError):  # incomplete, or just deleted
                manifest = json.loads(path.with_suffix(".json").read_text())
                content = path.read_bytes()
                if zlib.crc32(content) == manifest["crc32"]:
                    # The state may contain objects other than tensors, so it needs
                    # weights_only=False. The checksum shows that this training wrote the file.
                    return manifest, torch.load(
                        io.BytesIO(content), map_location=device, weights_only=False
                    )
            print(f"{path.name} is damaged: the previous checkpoint is used", flush=True)
        return None

    def note_start(self, start: dict[str, Any]) -> None:
        """Write the description of a start of the workers to a new file `start-<n>.json`.

        start: the description, such as {"step": 40, "nodes": [0, 2], "lost_steps": 3}.

        Raises OSError if the file cannot be written.
        """
        write_json(self.folder / f"start-{len(self.read('start')):06d}.json", start)

    def read(self, kind: str) -> list[dict[str, Any]]:
        """Return the content of all JSON files of one kind, the oldest file first.

        kind: "step" for the manifests of states, including deleted states; "start" for the
            descriptions of starts that `note_start` has stored.
        """
        return [json.loads(path.read_text()) for path in sorted(self.folder.glob(f"{kind}-*.json"))]
