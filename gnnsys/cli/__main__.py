"""`python -m gnnsys.cli`: the `gnnsys` command without its entry point."""

import sys

from gnnsys.cli.main import main

sys.exit(main())
