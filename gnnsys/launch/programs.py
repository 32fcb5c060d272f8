"""How programs of this room are started where files of a user lie: none of those must take the place of a module.

`python -m` has the working directory first among the places of modules: a `random.py` there would be imported for
Python's own. Here it comes last, so that a checkout of gnnsys in it is still found where none is installed.
"""

from __future__ import annotations

from collections.abc import Iterable


def program_of(module: str, call: str = "main()") -> str:
    """For `python -c`: runs `main` of a module of gnnsys.launch."""
    return f"import sys; sys.path.sort(key=''.__eq__); from gnnsys.launch.{module} import main; {call}"


def for_torchrun(words: Iterable[str]) -> list[str]:
    """Words of a script as torchrun must get them: it takes $$ for $, and `${local_rank}` for the rank's number."""
    return [word.replace("$$", "$$$$") for word in words]
