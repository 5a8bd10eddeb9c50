"""`python -m mlx_transmuter`: the command line."""

import sys

from mlx_transmuter.cli import main

sys.exit(main())
