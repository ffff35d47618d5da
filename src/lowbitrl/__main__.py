"""`python -m lowbitrl` is the command line."""

from lowbitrl.cli import main

main()
