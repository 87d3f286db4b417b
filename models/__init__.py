"""One file for each architecture. Installed as the package ``fmoe.models``."""

if __name__ != "fmoe.models":
    # Under a second name every class here would exist twice, and the two would not compare equal.
    raise ImportError(
        f"this folder was imported as {__name__!r}, but its only name is 'fmoe.models': "
        "install the checkout (make test, or pip install -e .) and write 'import fmoe.models'"
    )
