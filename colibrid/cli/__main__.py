"""`python -m colibrid.cli` is `colibrid`."""

from colibrid.cli.main import main

main()
