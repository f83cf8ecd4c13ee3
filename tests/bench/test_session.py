"""The file of a card, and the sessions that bring it forward."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("optax")

from benchmarks import __main__ as bench
from benchmarks import records, session
from benchmarks.records import Measured
from tests.doc_blocks import ROOT

pytestmark = pytest.mark.site
TINY = "precision --shape 8,16,64", "precision --shape 8,16,65"


def a_run(date: str = "2026-01-02", code: str = "now", kind: str = "cpu") -> dict[str, Any]:
    return {"date": date, "commit": None, "code": code, "rounds": 1, "device": {"device_kind": kind}}


def test_a_session_goes_on_where_the_last_one_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out, started = tmp_path / "cpu.json", []
    run_job = session._run
    monkeypatch.setattr(session, "_device_kind", lambda: "cpu")
    monkeypatch.setattr(session, "PLAN", TINY)
    monkeypatch.setattr(session, "_run", lambda key, *more: started.append(key) or run_job(key, *more))
    arguments = ["session", "--minutes", "5", "--rounds", "1", "--out", str(out)]
    assert bench.main(arguments) == 0
    first = records.read(out)
    assert tuple(first["jobs"]) == TINY
    assert {run["code"] for run in first["runs"].values()} == {records.code()}
    assert bench.main(arguments) == 0  # nothing is due
    assert started == list(TINY)
    assert records.read(out) == first
    del first["jobs"][TINY[0]]
    out.write_text(json.dumps(first))
    assert bench.main(arguments) == 0
    assert started == [*TINY, TINY[0]]
    assert set(records.read(out)["jobs"]) == set(TINY)


def test_a_job_that_fails_is_named_and_the_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(session, "PLAN", ["kl --shape 8,16", TINY[0]])
    monkeypatch.setattr(session, "_device_kind", lambda: "cpu")
    arguments = ["session", "--rounds", "1", "--out", str(tmp_path / "cpu.json")]
    assert bench.main([*arguments, "--list"]) == 0
    assert capsys.readouterr().out == f"kl --shape 8,16\n{TINY[0]}\n"
    assert bench.main(arguments) == 1
    assert "kl --shape 8,16: exit status 2" in capsys.readouterr().out
    assert list(records.read(tmp_path / "cpu.json")["jobs"]) == [TINY[0]]


def test_the_minutes_end_a_session(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seconds = iter((0.0, 1.0, 61.0, 61.0, 61.0))
    monkeypatch.setattr(session.time, "monotonic", lambda: next(seconds))
    monkeypatch.setattr(session, "_device_kind", lambda: "cpu")
    monkeypatch.setattr(session, "_run", lambda *_: "not done within 59 s")
    monkeypatch.setattr(session, "PLAN", TINY)
    out = tmp_path / "cpu.json"
    assert bench.main(["session", "--minutes", "1", "--out", str(out)]) == 0
    assert "1 of 2 jobs remain for the next session" in capsys.readouterr().out
    assert not out.exists()  # the session ended the job, which may be right


def test_what_is_missing_comes_first_and_then_the_oldest(tmp_path: Path) -> None:
    path = tmp_path / "card.json"
    row = Measured({"a": {"median_seconds": 1.0}})
    records.merge(path, "newer", row, a_run("2026-02-02", "before"))
    records.merge(path, "older", row, a_run("2026-01-01", "before"))
    records.merge(path, "done", row, a_run())
    file = records.read(path)
    assert session.list_due_jobs(file, ["done", "newer", "older", "missing"], "now") == ["missing", "older", "newer"]


def test_a_command_replaces_its_earlier_rows(tmp_path: Path) -> None:
    path = tmp_path / "card.json"
    records.merge(path, "heads", Measured({"a": {"x": 1}, "b": {"x": 1}}, {"dtype": "float32"}), a_run("2026-01-01"))
    records.merge(path, "kl", Measured({"c": {"x": 2}}), a_run("2026-01-02"))
    records.merge(path, "heads", Measured({"b": {"x": 3}}), a_run("2026-01-03"))
    file = records.read(path)
    (job,) = records.jobs(file, "heads")
    assert [(row["name"], row["x"], row["run"]["date"]) for row in job["rows"]] == [("b", 3, "2026-01-03")]
    assert [run["date"] for run in file["runs"].values()] == ["2026-01-02", "2026-01-03"]
    with pytest.raises(ValueError, match="has rows of cpu, but this is NVIDIA H200"):
        records.read(path, "NVIDIA H200")


def test_a_file_of_another_card_is_refused_before_anything_is_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "card.json"
    records.merge(path, "kl", Measured({"a": {}}), a_run(kind="NVIDIA H200"))
    with pytest.raises(SystemExit):
        bench.main(["kl", "--shape", "8,16,64", "--out", str(path)])
    assert "name another file" in capsys.readouterr().err


def test_words_do_not_change_the_version_of_the_code() -> None:
    plain = "def f(x):\n    return x + 1\n"
    words = '"""Of numbers."""\n\n\ndef f(x):\n    """One more."""\n    # of it\n    return x + 1\n'
    assert records._strip_docstrings(plain) == records._strip_docstrings(words)
    assert records._strip_docstrings(plain) != records._strip_docstrings(plain.replace("1", "2"))


def test_every_planned_command_is_one_job_with_that_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jax.default_backend", lambda: "gpu")
    for key in session.PLAN:
        assert_is_a_job(key)


@pytest.mark.parametrize(("card", "kind"), [("h100", "NVIDIA H100 80GB HBM3"), ("h200", "NVIDIA H200")])
def test_every_job_of_a_recorded_file_can_be_repeated(card: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jax.default_backend", lambda: "gpu")
    for key in records.read(ROOT / "benchmarks" / f"{card}.json", kind)["jobs"]:
        assert_is_a_job(key)


def test_the_file_of_the_h100_is_the_plan() -> None:
    file, planned = records.read(ROOT / "benchmarks" / "h100.json"), session.PLAN
    assert set(planned) - set(file["jobs"]) <= {"heads --shape 205280,4096,76032 --no-peers"}
    for measured in file["jobs"].values():
        runs = [file["runs"][row["run"]] for row in measured["rows"].values()]
        assert len({(run["commit"], run["code"]) for run in runs}) == 1  # rows of a table are compared


def assert_is_a_job(key: str) -> None:
    part, *arguments = shlex.split(key)
    command, module = bench.parser(part)
    assert [job.key for job in module.jobs(command.parse_args(arguments), command)] == [key]
