"""tests/models/families_table.py, and that the README's table is what it makes."""

import json
from inspect import signature

import pytest

import fmoe
from fmoe.architectures import KNOWN

from .families_table import (
    END,
    FIGURES,
    README,
    START,
    family_name,
    make_table,
    put_table,
    read_figures,
    read_report,
    round_up,
)
from .test_config_values import FAMILIES


def test_the_table_in_the_readme_is_not_stale(tmp_path):
    text = README.read_text()
    assert text == put_table(text, make_table(FAMILIES, read_figures(), tmp_path)), "README.md: run make families"


def test_every_family_has_a_row_and_no_other_has_a_figure():
    table = README.read_text().partition(START)[2].partition(END)[0]
    names = [family_name(architecture) for architecture in KNOWN]
    rows = [line.split("|")[1].strip() for line in table.splitlines() if line.startswith("|")]
    assert rows == ["family", "---", *names, "llama4"]
    assert sorted(read_figures()) == sorted(names)
    assert FIGURES.read_text() == json.dumps(read_figures(), indent=2) + "\n"


@pytest.mark.parametrize("kind", ["mixtral", "hunyuan_v1_moe"])
def test_a_family_that_is_missing_is_an_error(kind, tmp_path):
    figures = {family_name(architecture): {"parity": 1e-6, "compiled": True} for architecture in KNOWN}
    with pytest.raises(ValueError, match=rf"{kind} has no config in test_config_values.py; add one, then run make"):
        make_table({name: raw for name, raw in FAMILIES.items() if name != kind}, figures, tmp_path)
    del figures[kind]
    with pytest.raises(ValueError, match=f"{kind} has no figure in families.json; run make families"):
        make_table(FAMILIES, figures, tmp_path)


def test_rows_say_what_a_config_has(tmp_path):
    figures = {family_name(architecture): {"parity": 3e-6, "compiled": True} for architecture in KNOWN}
    figures["mixtral"] = {"parity": 2e-5, "compiled": False}
    lines = make_table(FAMILIES, figures, tmp_path).splitlines()
    assert "| mixtral | `mixtral` | yes | 2e-05 | none shared | no | no |" in lines
    assert "| deepseek_v3 | `deepseek_v3`, `kimi_k2` | yes | 3e-06 | yes | yes |" in "\n".join(lines)
    drafting = "yes" if "speculate" in signature(fmoe.generate).parameters else "no"
    for name in ("deepseek_v3", "qwen3_next", "glm4_moe", "glm4_moe_lite"):
        assert any(line.startswith(f"| {name} |") and line.endswith(f"| {drafting} |") for line in lines), name
    wide = FAMILIES | {"granitemoeshared": FAMILIES["granitemoeshared"] | {"shared_intermediate_size": 60}}
    assert "| granitemoe | `granitemoe`, `granitemoeshared` | yes | 3e-06 | yes | yes |" in "\n".join(lines)
    assert "`granitemoeshared` | yes | 3e-06 | no | yes |" in make_table(wide, figures, tmp_path)
    assert any(
        line.startswith("| llama4 | `llama4`, `llama4_text` | no: a weight multiplies the input") for line in lines
    )


@pytest.mark.parametrize(
    ("value", "expected"),
    [(1e-6, 1e-6), (1.01e-6, 2e-6), (9.99e-6, 1e-5), (3.2, 4.0), (2e-5, 2e-5), (3e-5, 3e-5), (0.0, 1e-7), (1e-9, 1e-7)],
)
def test_round_up(value, expected):
    assert round_up(value) == expected


REPORT = """<testsuites><testsuite>
<testcase name="test_logits[a-1]"><properties><property name="family" value="mixtral"/>
<property name="difference" value="1.5e-06"/></properties></testcase>
<testcase name="test_logits[a-65]"><properties><property name="family" value="mixtral"/>
<property name="difference" value="2.5e-06"/></properties><failure message="more than noted"/></testcase>
<testcase name="test_compiled_equals_eager[a]"><properties><property name="family" value="mixtral"/></properties>
</testcase>
<testcase name="test_logits[a-1]"><properties><property name="family" value="qwen3_moe"/>
<property name="difference" value="4e-06"/></properties></testcase>
<testcase name="test_compiled[a]"><properties><property name="family" value="qwen3_moe"/></properties><failure/>
</testcase>
<testcase name="test_logits_of_nobody"/>
</testsuite></testsuites>"""


def test_read_report():
    assert read_report(REPORT) == {
        "mixtral": {"parity": 3e-6, "compiled": True},
        "qwen3_moe": {"parity": 4e-6, "compiled": False},
    }


def test_put_table():
    assert put_table(f"a\n{START}old\n{END}b\n", "new\n") == f"a\n{START}new\n{END}b\n"
    for text in ("a", START, END, f"{END}{START}"):
        with pytest.raises(
            ValueError, match=r"README.md must hold the lines '<!-- families: made by make families -->'"
        ):
            put_table(text, "")
