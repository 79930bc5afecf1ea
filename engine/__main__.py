"""`python -m engine`: the engine process (see `engine.process.loop`)."""

import sys

from engine.process.loop import main

sys.exit(main())
