"""`python -m server`: as `jpaged serve`."""

import sys

from server.serve import main

sys.exit(main())
