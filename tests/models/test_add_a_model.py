"""docs/add_a_model.md names only what exists, and all that a family must provide."""

import re
from pathlib import Path

from fmoe.architectures import KNOWN, Architecture

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "add_a_model.md").read_text()
TERMS = re.findall(r"`([^`\n]+)`", PAGE)


def test_files_exist():
    files = {term for term in TERMS if re.fullmatch(r"[\w.]+/[\w./]*", term)}
    assert len(files) > 10
    assert [file for file in files if not (ROOT / file).exists()] == []


def test_names_occur_in_the_code():
    code = "\n".join(
        path.read_text()
        for top in ("fmoe", "models", "tests")
        for path in (ROOT / top).rglob("*.py")
        if path != Path(__file__)
    )
    names = {name for term in TERMS if not term.count(".py") for name in re.findall(r"[A-Za-z_]\w+", term)}
    assert len(names) > 40
    missing = [name for name in names - {"fmoe", "info"} if not re.search(rf"\b{name}\b", code)]
    assert missing == []


def test_the_table_lists_what_the_protocol_asks_for():
    asked = {name for name in vars(Architecture) if not name.startswith("_")} | set(Architecture.__annotations__)
    rows = re.findall(r"^\| (`[A-Za-z_`, ]+|`[a-z_]+\([^|]*) \|", PAGE, flags=re.MULTILINE)
    listed = {name for row in rows for name in re.findall(r"`([A-Za-z_]+)", row)}
    assert asked <= listed
    assert all(hasattr(family, name) for family in KNOWN for name in asked)
