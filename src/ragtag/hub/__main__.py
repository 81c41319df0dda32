"""`python -m ragtag.hub`: the hub of one run, as a process of its own."""

import sys

from ragtag import __version__
from ragtag.hub.process import main

sys.exit(main(sys.argv[1:], version=__version__))
