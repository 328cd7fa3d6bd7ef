"""Finding torchrun, and letting a Python without rankscope load it."""

from __future__ import annotations

import importlib.util
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import rankscope
from rankscope.errors import RankscopeError

__all__ = ["is_own", "torchrun", "visible_package"]

# `python -m` would put the working directory in front of sys.path, where a user's `queue.py` would break torchrun;
# the `torchrun` script does not.
_MAIN = (
    "import sys; sys.argv[0] = 'torchrun'; sys.path[:1] = sys.path[:1] if sys.path[0] else []; "
    "from torch.distributed.run import main; sys.exit(main())"
)


def is_own() -> bool:
    """Return whether this interpreter has torch."""
    spec = importlib.util.find_spec("torch")
    return spec is not None and spec.origin is not None


def torchrun() -> list[str]:
    """Give the command that is `torchrun`: this interpreter's if it has torch, else the one on PATH."""
    if is_own():
        return [sys.executable, "-c", _MAIN]
    found = shutil.which("torchrun")
    if found is None:
        raise RankscopeError(
            f"neither {sys.executable} has torch nor is torchrun on PATH; install torch or activate its environment"
        )
    return [found]


@contextmanager
def visible_package() -> Iterator[str]:
    """Make a folder for PYTHONPATH through which a Python without rankscope finds it; removed again afterwards.

    It holds what torch looks for: an entry point of an installed package, which imports the package linked beside it.
    """
    with TemporaryDirectory(prefix="rankscope-") as folder:
        info = Path(folder, f"rankscope-{rankscope.__version__}.dist-info")
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: rankscope\nVersion: {rankscope.__version__}\n")
        (info / "entry_points.txt").write_text("[torch.backends]\nrankscope = rankscope_entry:autoload\n")
        # An exception in the entry point would abort the job's `import torch`, and the other Python may be too old.
        Path(folder, "rankscope_entry.py").write_text(
            "def autoload():\n"
            "    try:\n"
            "        from rankscope.collectors import boot\n"
            "    except Exception as error:\n"
            "        import sys\n"
            "        print('rankscope: not recording this process: %r' % error, file=sys.stderr)\n"
            "    else:\n"
            "        boot.autoload()\n"
        )
        Path(folder, "rankscope").symlink_to(Path(rankscope.__file__).parent, target_is_directory=True)
        yield folder
