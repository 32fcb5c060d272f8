"""One module per subcommand; what a module must have is said in `gnnsys.cli.main`.

`GROUPS` is the one place that lists them, by what one wants to do, in the order of `gnnsys --help`.
"""

GROUPS: dict[str, tuple[str, ...]] = {
    "start here": ("demo", "info", "doctor"),
    "prepare data": ("partition", "inspect", "push"),
    "run": ("profile", "plan", "simulate", "estimate", "launch", "jobs", "serve", "assist"),
    "measure": ("bench",),
    "in your shell": ("completion",),
}
