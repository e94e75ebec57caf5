"""mutate.py finds what it may change, repeats its sample, and tells caught from surviving."""

import ast

import mutate
import pytest

pytestmark = pytest.mark.slow

TOY = '''"""A module: 1 + 1."""
LIMIT = 3


def clamp(x: int, low: int = 0) -> int:
    """Keep x above low and up to 3."""
    assert low < LIMIT, "low < 3"
    if x < low and not isinstance(x, bool):
        return low
    if x > LIMIT:
        raise ValueError("é: x > 3", 4 + 4)
    return pow(x, LIMIT)
'''
TEST = "from float8.toy.clamp import clamp\n\ndef test_clamp():\n    assert clamp(-1) == 0\n"


@pytest.fixture
def toy(tmp_path, monkeypatch):
    """A repository with one module and one test file, an area ``toy``."""
    monkeypatch.setitem(mutate.PACKAGES, "toy", ("toy",))
    for path, text in {
        "float8/__init__.py": "",
        "float8/toy/__init__.py": "",
        "float8/toy/clamp.py": TOY,
        "test/toy/test_clamp.py": TEST,
    }.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    return tmp_path


def test_mutants_change_what_runs_and_nothing_else():
    mutants = mutate.mutants_of("clamp.py", TOY)
    assert {(m.line, m.kind, m.before, m.after) for m in mutants} == {
        (
            8,
            "and/or",
            "x < low and not isinstance(x, bool)",
            "(x < low or not isinstance(x, bool))",
        ),
        (8, "comparison", "x < low", "(x >= low)"),
        (8, "boundary", "x < low", "(x <= low)"),
        (
            8,
            "negation",
            "x < low and not isinstance(x, bool)",
            "(not (x < low and (not isinstance(x, bool))))",
        ),
        (8, "negation", "not isinstance(x, bool)", "(isinstance(x, bool))"),
        (9, "return", "return low", "return None"),
        (10, "comparison", "x > LIMIT", "(x <= LIMIT)"),
        (10, "boundary", "x > LIMIT", "(x >= LIMIT)"),
        (12, "return", "return pow(x, LIMIT)", "return None"),
        (12, "argument order", "pow(x, LIMIT)", "(pow(LIMIT, x))"),
    }
    for mutant in mutants:
        ast.parse(mutate.mutated(TOY.encode(), mutant))


def test_a_planted_mutant_is_caught(toy):
    """The comparison is tested, its boundary is not."""
    mutants = mutate.mutants_of("float8/toy/clamp.py", TOY)
    planted = [m for m in mutants if (m.line, m.kind) in [(8, "comparison"), (8, "boundary")]]
    found = mutate.failures([toy], planted, "toy", [], limit=60)
    assert found == {
        planted[0]: ["test/toy/test_clamp.py::test_clamp"],
        planted[1]: [],
    }
    assert (toy / "float8/toy/clamp.py").read_text() == TOY
