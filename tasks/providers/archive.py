"""Pack files as a .tar.gz archive. Equal files always give equal bytes."""

import gzip
import io
import tarfile
from collections.abc import Mapping

_MODIFIED_UNIX = 315_619_200  # 1980-01-02; zip files such as wheels cannot store dates before 1980


def archive(contents: Mapping[str, bytes]) -> bytes:
    """Return a .tar.gz archive. `contents` maps the name of each file to its content."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as tar:
        for name in sorted(contents):
            member = tarfile.TarInfo(name)
            member.size, member.mtime = len(contents[name]), _MODIFIED_UNIX
            tar.addfile(member, io.BytesIO(contents[name]))
    return gzip.compress(packed.getvalue(), mtime=0)
