"""Runs code in a process that is nobody, where the tests run as root: to root nothing is unreadable."""

import os
import subprocess
import sys
from pathlib import Path

_BEGIN = """
import os, sys
sys.path[:] = {path!r}
{imports}
if os.geteuid() == 0:
    os.setuid(65534)
{code}
"""


def printed_by_nobody(place: Path, imports: str, code: str) -> list[str]:
    """The lines that the code prints.

    Args:
        place: the test's folder, ``tmp_path``, which nobody may enter then.
        imports: run before, as the files of a package may be unreadable to nobody.
        code: what nobody does.
    """
    for parent in place.parents:
        if parent.stat().st_uid == os.geteuid() and str(parent).startswith(("/tmp/", "/dev/shm/")):
            parent.chmod(parent.stat().st_mode | 0o055)
    place.chmod(0o755)
    script = _BEGIN.format(path=sys.path, imports=imports, code=code)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()
