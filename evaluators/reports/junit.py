"""`junit`: JUnit XML, read as a stream. No document type, no entities, bounded depth and size."""

from __future__ import annotations

from xml.parsers import expat

from evaluators.reports.findings import MAX_BYTES, Findings, ReportError, Status, collect

_MAX_DEPTH = 64
_OUTCOMES: dict[str, Status] = {"failure": "failed", "error": "error", "skipped": "skipped"}


def parse(data: bytes) -> Findings:
    """Status by `classname::name` (`name` alone without a class). A case with several outcomes keeps the worst."""
    if len(data) > MAX_BYTES:
        raise ReportError(f"report of {len(data)} bytes (at most {MAX_BYTES})")
    reader = _Reader()
    parser = expat.ParserCreate()
    parser.StartDoctypeDeclHandler = _refuse
    parser.EntityDeclHandler = _refuse
    parser.StartElementHandler = reader.start
    parser.EndElementHandler = reader.end
    try:
        parser.Parse(data, True)
    except expat.ExpatError as e:
        raise ReportError(f"not well-formed XML: {e}") from e
    if not reader.suites:
        raise ReportError("XML without a 'testsuite' element")
    return Findings(tests=collect(reader.results))


def _refuse(*_: object) -> None:
    raise ReportError("XML with a document type or entities")


class _Reader:
    def __init__(self) -> None:
        self.depth = 0
        self.suites = 0
        self.results: list[tuple[str, Status]] = []
        self._case: str | None = None
        self._case_depth = 0

    def start(self, tag: str, attributes: dict[str, str]) -> None:
        self.depth += 1
        if self.depth > _MAX_DEPTH:
            raise ReportError(f"XML nested deeper than {_MAX_DEPTH}")
        if tag == "testsuite":
            self.suites += 1
        elif tag == "testcase" and self._case is None:
            group, name = attributes.get("classname", ""), attributes.get("name", "")
            self._case, self._case_depth = f"{group}::{name}" if group else name, self.depth
            self.results.append((self._case, "passed"))
        elif self._case is not None and self.depth == self._case_depth + 1 and tag in _OUTCOMES:
            self.results.append((self._case, _OUTCOMES[tag]))

    def end(self, tag: str) -> None:
        if self._case is not None and self.depth == self._case_depth:
            self._case = None
        self.depth -= 1
