import sys

from jaxrl_async.cli import main

sys.exit(main.main(sys.argv[1:]))
