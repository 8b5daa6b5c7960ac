"""``python -m benchmarks.published``: see :mod:`benchmarks.published.report`."""

import sys

from benchmarks.published.report import main

sys.exit(main(sys.argv[1:]))
