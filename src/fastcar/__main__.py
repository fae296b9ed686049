"""``python -m fastcar``."""

import sys

from fastcar.cli import main

sys.exit(main())
