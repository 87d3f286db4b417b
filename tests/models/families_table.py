"""The README's table of families: what each one is tested for, made anew by ``make families``.

Loading, fused shared experts and drafts are looked up each time. Parity and compiled graphs are what a run of the tests
found; families.json keeps it, the tests of parity hold every later run to it, and test_families_table.py the README.
"""

import json
import math
import subprocess
import sys
import tempfile
from inspect import signature
from pathlib import Path
from xml.etree import ElementTree

import fmoe
from fmoe.architectures import KNOWN, REFUSED
from fmoe.info import describe

from .test_config_values import FAMILIES

FIGURES = Path(__file__).with_name("families.json")
README = Path(__file__).parents[2] / "README.md"
START, END = "<!-- families: made by make families -->\n", "<!-- end of families -->\n"
MARGIN = 10  # times the figure: processors add in different orders
HEAD = """
| family | `model_type` | loads | parity | FSE | compiled | MTP |
|---|---|---|--:|---|---|---|
"""


def family_name(architecture):
    """Name a family by its file in models/."""
    return architecture.__name__.rpartition(".")[2]


def read_figures():
    """Read what the tests found: ``{family: {"parity": difference, "compiled": true}}``."""
    return json.loads(FIGURES.read_text()) if FIGURES.exists() else {}


def round_up(value):
    """Round up to one significant digit; what is smaller than 1e-7 gives 1e-7."""
    value = max(value, 1e-7)
    power = math.floor(math.log10(value))
    digit = math.ceil(round(value / 10**power, 6))
    return float(f"{digit}e{power}")


def read_report(text):
    """Read a JUnit report of pytest: the largest difference of each family, and which ran compiled."""
    figures = {}
    for case in ElementTree.fromstring(text).iter("testcase"):
        found = {entry.get("name"): entry.get("value") for entry in case.iter("property")}
        name, entry = case.get("name", ""), figures.setdefault(found.get("family"), {"parity": 0.0, "compiled": False})
        if name.startswith("test_logits[") and "difference" in found:
            entry["parity"] = max(entry["parity"], float(found["difference"]))
        if name.startswith("test_compiled") and case.find("failure") is case.find("error") is case.find("skipped"):
            entry["compiled"] = True
    figures.pop(None, None)
    return {family: entry | {"parity": round_up(entry["parity"])} for family, entry in sorted(figures.items())}


def describe_family(architecture, raw, folder):
    """Look up (loads, FSE, MTP) of a family by a small config: its layers are built without weights."""
    (folder / "config.json").write_text(json.dumps(raw))
    groups = describe(folder, device="cpu").groups
    if any(group.shared_slots for group in groups):
        shared = "yes"
    else:
        shared = "no" if any(group.shared_width for group in groups) else "none shared"
    drafts = hasattr(architecture, "build_drafts") and "speculate" in signature(fmoe.generate).parameters
    return "yes", shared, "yes" if drafts else "no"


def make_rows(configs, figures, folder):
    """Make a row for each family of KNOWN and of REFUSED; a family without a config or a figure is an error."""
    rows = []
    for architecture in KNOWN:
        name = family_name(architecture)
        raw = [raw | {"model_type": kind} for kind, raw in configs.items() if kind in architecture.MODEL_TYPES]
        if not raw:
            raise ValueError(f"{name} has no config in test_config_values.py; add one, then run make families")
        if name not in figures:
            raise ValueError(f"{name} has no figure in families.json; run make families")
        loads, shared, drafts = describe_family(architecture, raw[0], folder)
        kinds = ", ".join(f"`{kind}`" for kind in architecture.MODEL_TYPES)
        parity, compiled = figures[name]["parity"], "yes" if figures[name]["compiled"] else "no"
        rows.append(f"| {name} | {kinds} | {loads} | {parity:.0e} | {shared} | {compiled} | {drafts} |\n")
    for reason in dict.fromkeys(REFUSED.values()):
        names = [name for name, why in REFUSED.items() if why == reason and name.islower()]  # model types, not classes
        kinds = ", ".join(f"`{name}`" for name in names)
        rows.append(f"| {names[0]} | {kinds} | no: {reason} | | | | |\n")
    return rows


def make_table(configs, figures, folder):
    """Make what stands between the markers."""
    return HEAD + "".join(make_rows(configs, figures, folder)) + "\n"


def put_table(text, table):
    """Replace what stands between the markers of the README."""
    before, start, rest = text.partition(START)
    _, end, after = rest.partition(END)
    if not (start and end):
        raise ValueError(f"README.md must hold the lines {START.strip()!r} and {END.strip()!r}, one after the other")
    return before + start + table + end + after


def run_tests(paths):
    """Run the tests of parity and of compiled graphs; what one finds is read even where it fails."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-k", "test_logits or test_compiled", f"--junitxml={report}"]
        subprocess.run([*command, *paths], check=False)
        return read_report(report.read_text())


def main():
    """Note the figures of the families that the tests ran, all or those of the files named, and write the table."""
    found = read_figures() | run_tests(sys.argv[1:] or [str(FIGURES.parent)])
    figures = {name: found[name] for name in sorted(map(family_name, KNOWN)) if name in found}
    FIGURES.write_text(json.dumps(figures, indent=2) + "\n")
    with tempfile.TemporaryDirectory() as folder:
        README.write_text(put_table(README.read_text(), make_table(FAMILIES, figures, Path(folder))))


if __name__ == "__main__":
    main()
