"""`python -m gpulayer.cli`."""

import sys

from gpulayer.cli import main

sys.exit(main())
