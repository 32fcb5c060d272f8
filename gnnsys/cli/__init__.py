"""The `gnnsys` command: a thin face over the rooms, one file per subcommand in `commands/`."""

from gnnsys.cli.main import main

__all__ = ["main"]
