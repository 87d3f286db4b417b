"""``python -m fmoe`` is the command ``fmoe``."""

from .cli import main

if __name__ == "__main__":
    main(prog_name="fmoe")
