import sys

from veca.cli.main import main

sys.exit(main())
