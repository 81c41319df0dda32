"""`python -m ragtag.outer`: the outer loop of one run, as a process of its own."""

import os
import sys

# Before torch is loaded: merging is bound by memory, and the workers of this machine need its processors.
os.environ.setdefault("OMP_NUM_THREADS", "1")

from ragtag import __version__
from ragtag.outer.process import main

sys.exit(main(sys.argv[1:], version=__version__))
