"""``python -m ems.cli``: the ``ems`` command where its script is not on the path."""

from ems.cli import main

main()
