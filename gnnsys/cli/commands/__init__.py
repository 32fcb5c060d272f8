"""One module per subcommand; what a module must have is said in `gnnsys.cli.main`."""
