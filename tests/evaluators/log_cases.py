# ruff: noqa: E501
"""Recorded test logs of several repositories, in the formats their runners print, for grading beside `swebench` itself.

Each: repository, parser, exit code of the test command, FAIL_TO_PASS, PASS_TO_PASS, log. Written for this suite.
"""

from __future__ import annotations

from typing import NamedTuple


class LogCase(NamedTuple):
    name: str
    repo: str
    parser: str
    fail_to_pass: list[str]
    pass_to_pass: list[str]
    log: str
    exit_code: int = 0
    eval_type: str = "pass_and_fail"
    version: str = "1.0"


def _pytest(passed=(), failed=(), errors=(), skipped=0, xfailed=()) -> str:
    lines = ["============================= test session starts ==============================",
             "collected 9 items", "", "=========================== short test summary info ============================"]  # fmt: skip
    lines += [f"PASSED {t}" for t in passed] + [f"XFAIL {t}" for t in xfailed]
    lines += [f"SKIPPED [{skipped}] tests/test_x.py:3: not here"] if skipped else []
    lines += [f"FAILED {t} - AssertionError: assert 1 == 2" for t in failed] + [f"ERROR {t}" for t in errors]
    return "\n".join([*lines, f"=== {len(failed)} failed, {len(passed)} passed in 0.21s ===", ""])


A, B, C = "tests/test_a.py::test_one", "tests/test_a.py::test_two[x-1]", "tests/test_b.py::TestB::test_three"
U = "tests/test_u.py::test_path[/home/me/data/file.txt]"
CASES = [
    LogCase("flask-resolved", "pallets/flask", "parse_log_flask", [A], [B, C], _pytest([A, B, C])),
    LogCase("flask-f2p-fails", "pallets/flask", "parse_log_flask", [A], [B, C], _pytest([B, C], [A]), 1),
    LogCase("flask-p2p-breaks", "pallets/flask", "parse_log_flask", [A], [B, C], _pytest([A, B], [C]), 1),
    LogCase("xarray-missing", "pydata/xarray", "parse_log_xarray", [A, B], [C], _pytest([A, C])),
    LogCase("xarray-xfail-counts", "pydata/xarray", "parse_log_xarray", [A], [B], _pytest([B], xfailed=[A])),
    LogCase("pytest-collection-error", "pytest-dev/pytest", "parse_log_pytest", [A], [B], _pytest([], errors=["tests/test_a.py"]), 2),
    LogCase("pytest-nothing-ran", "pytest-dev/pytest", "parse_log_pytest", [A], [], "ImportError: no module named x\n", 4),
    LogCase("pytest-exit-code-alone", "pytest-dev/pytest", "parse_log_pytest", [A], [B], _pytest([A, B]), 1),
    LogCase("pylint-options", "pylint-dev/pylint", "parse_log_pylint", ["tests/test_u.py::test_path[/file.txt]"], [A], _pytest([U, A])),
    LogCase("requests-options-fail", "psf/requests", "parse_log_requests", ["tests/test_u.py::test_path[/file.txt]"], [A], _pytest([A], [U]), 1),
    LogCase("astropy-v2-colours", "astropy/astropy", "parse_log_astropy", [A], [B], _pytest([A, B]).replace("PASSED", "\x1b[32mPASSED\x1b[0m")),
    LogCase("astropy-cut-id", "astropy/astropy", "parse_log_astropy", ["t.py::test_g[log(photon"], [A], _pytest(["t.py::test_g[log(photon /s)-1]", "t.py::test_g[log(photon /s)-2]", A])),
    LogCase("astropy-cut-id-disagrees", "astropy/astropy", "parse_log_astropy", ["t.py::test_g[log(photon"], [A], _pytest(["t.py::test_g[log(photon /s)-1]", A], ["t.py::test_g[log(photon /s)-2]"]), 1),
    LogCase("sphinx-old-lines", "sphinx-doc/sphinx", "parse_log_sphinx", [A], [B], f"{A} PASSED\n{B} PASSED\n"),
    LogCase("scikit-fails", "scikit-learn/scikit-learn", "parse_log_scikit", [A], [B], f"{A} FAILED\n{B} PASSED\n", 1),
    LogCase("seaborn", "mwaskom/seaborn", "parse_log_seaborn", [A], [B], f"{A} PASSED [ 50%]\n{B} PASSED [100%]\n"),
    LogCase("seaborn-fails", "mwaskom/seaborn", "parse_log_seaborn", [A], [B], f"{B} PASSED [100%]\nFAILED {A} - x\n", 1),
    LogCase("matplotlib", "matplotlib/matplotlib", "parse_log_matplotlib", ["t.py::test_c[1]"], [A], _pytest(["t.py::test_c[MouseButton.LEFT]", A])),
    LogCase("django-resolved", "django/django", "parse_log_django", ["test_a (app.tests.T)"], ["test_b (app.tests.T)", "A docstring."],
            "test_a (app.tests.T) ... ok\ntest_b (app.tests.T) ... ok\nA docstring. ... ok\n\nRan 3 tests in 0.1s\n\nOK\n"),
    LogCase("django-fails", "django/django", "parse_log_django", ["test_a (app.tests.T)"], ["test_b (app.tests.T)"],
            "test_a (app.tests.T) ... FAIL\ntest_b (app.tests.T) ... ok\n======\nFAIL: test_a (app.tests.T)\n", 1),
    LogCase("django-skipped-f2p", "django/django", "parse_log_django", ["test_a (app.tests.T)"], ["test_b (app.tests.T)"],
            "test_a (app.tests.T) ... skipped 'no database'\ntest_b (app.tests.T) ... ok\n"),
    LogCase("django-skipped-p2p", "django/django", "parse_log_django", ["test_a (app.tests.T)"], ["test_b (app.tests.T)"],
            "test_a (app.tests.T) ... ok\ntest_b (app.tests.T) ... skipped 'no database'\n"),
    LogCase("django-error", "django/django", "parse_log_django", ["test_a (app.tests.T)"], [], "test_a (app.tests.T) ... ERROR\n", 1),
    LogCase("sympy-resolved", "sympy/sympy", "parse_log_sympy", ["test_a"], ["test_b"], "sympy/core/tests/test_x.py[2]\ntest_a ok\ntest_b ok [OK]\ntest_b ok\n"),
    LogCase("sympy-fails", "sympy/sympy", "parse_log_sympy", ["test_a"], ["test_b"], "test_a F\ntest_b ok\n____ sympy/core/tests/test_x.py:test_a ____\n", 1),
    LogCase("redis", "redis/redis", "parse_log_redis", ["SET and GET"], ["DEL"], "[ok]: SET and GET (2 ms)\n[ok]: DEL (1 ms)\n"),
    LogCase("redis-fails", "redis/redis", "parse_log_redis", ["SET and GET"], ["DEL"], "[err]: SET and GET in tests/unit/x.tcl\n[ok]: DEL (1 ms)\n", 1),
    LogCase("jq", "jqlang/jq", "parse_log_jq", ["tests/jqtest"], ["tests/onigtest"], "PASS: tests/jqtest\nPASS: tests/onigtest\n"),
    LogCase("caddy", "caddyserver/caddy", "parse_log_gotest", ["TestA"], ["TestB/sub"], "--- PASS: TestA (0.00s)\n    --- PASS: TestB/sub (0.00s)\nok  x 0.1s\n"),
    LogCase("caddy-skip", "caddyserver/caddy", "parse_log_gotest", ["TestA"], ["TestB"], "--- SKIP: TestA (0.00s)\n--- PASS: TestB (0.00s)\n"),
    LogCase("ruff-cargo", "astral-sh/ruff", "parse_log_cargo", ["a::b"], ["c::d"], "test a::b ... ok\ntest c::d ... ok\ntest e ... ignored\n"),
    LogCase("ruff-cargo-fails", "astral-sh/ruff", "parse_log_cargo", ["a::b"], ["c::d"], "test a::b ... FAILED\ntest c::d ... ok\n", 101),
    LogCase("laravel", "laravel/framework", "parse_log_phpunit", ["Cache > It stores"], ["Cache > It forgets"], "Cache (Tests\\Cache)\n ✔ It stores\n ✔ It forgets\n"),
    LogCase("laravel-fails", "laravel/framework", "parse_log_phpunit", ["Cache > It stores"], ["Cache > It forgets"], "Cache (Tests\\Cache)\n ✘ It stores\n ↩ It forgets\n", 1),
    LogCase("marked-fail-only", "markedjs/marked", "parse_log_marked", ["renders a link"], ["renders"], "12 specs, 0 failures\n", 0, "fail_only"),
    LogCase("marked-never-ran", "markedjs/marked", "parse_log_marked", ["renders a link"], ["renders"], "Error: Cannot find module 'jasmine'\n", 1, "fail_only"),
]  # fmt: skip
