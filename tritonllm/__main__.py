"""``python -m tritonllm`` is the command ``tritonllm``."""

import sys

from tritonllm.cli import main

if __name__ == "__main__":
    sys.exit(main())
