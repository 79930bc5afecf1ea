"""`python -m gateway.cli`: the `terazi` command without its launcher."""

from gateway.cli.main import main

main()
