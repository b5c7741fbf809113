"""`python -m semidfl`, for places where the package is on the path but not installed."""

import sys

from semidfl.cli import main

sys.exit(main())
