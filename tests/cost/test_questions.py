"""Worked questions: calls of the cost room answer every one within its tolerance."""

import json
import pathlib

import pytest

from autoshard.errors import UserError
from autoshard.serving import Decoder, train_state_bytes
from autoshard.validation import QuestionRow, validate_questions
from autoshard.validation.answer_register import ANSWERS


ROWS = {row.id: row for row in validate_questions()}

FAR = {
    # The book divides its own rounded 19 ms and 0.91 s; the bandwidth behind its 19 ms would give 19.5 ms.
    "ai-12": 3.0,
}
"""Rows outside of their tolerance, and the most percent by which each may be off."""


@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS.keys())
def test_row(row: QuestionRow) -> None:
    assert row.delta_percent is not None and not row.skipped and row.question
    if row.id in FAR:
        assert not row.within and abs(row.delta_percent) <= FAR[row.id]
    else:
        assert row.within, f"{row.question} ours {row.ours}, theirs {row.theirs} {row.unit}"


def test_enough_rows() -> None:
    assert len(ROWS) == 53
    assert all(row.within for row in ROWS.values() if row.kind in ("collective", "roofline", "spec", "memory"))
    others = [row for row in ROWS.values() if row.kind in ("training", "inference")]
    assert sum(row.within for row in others) >= 0.9 * len(others)


def test_answers_come_from_the_setting(tmp_path: pathlib.Path) -> None:
    """Change the answers in the file, and ours stay. Change the settings, and ours change."""
    source = pathlib.Path(validate_questions.__code__.co_filename).with_name("questions.json")
    document = json.loads(source.read_text())
    for row in document["rows"]:
        row["answer"] *= 7
    path = tmp_path / "rows.json"
    path.write_text(json.dumps(document))
    changed = {row.id: row for row in validate_questions(path)}
    assert {name: row.ours for name, row in changed.items()} == {name: row.ours for name, row in ROWS.items()}
    row = next(row for row in document["rows"] if row["id"] == "roof-01")
    row["setting"]["hbm_bw"] /= 2
    path.write_text(json.dumps([row]))
    (half,) = validate_questions(path)
    assert half.ours == pytest.approx(2 * (ROWS["roof-01"].ours or 0))


def test_unmapped_rows_say_so(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "rows.json"
    row = {
        "id": "new-1",
        "kind": "spec",
        "setting": {},
        "answer": 1,
        "unit": "",
        "tolerance": 0,
        "trust": "use",
        "source": "s",
    }
    path.write_text(json.dumps({"rows": [row]}))
    (answer,) = validate_questions(path)
    assert answer.ours is None and answer.delta_percent is None and not answer.within
    assert answer.skipped == "no call is mapped to the id new-1"


def _row(**changes: object) -> str:
    row = {
        "id": "roof-01", "kind": "roofline", "setting": {"chip": "v5e"}, "answer": 240, "unit": "tokens",
        "tolerance": 0.02, "trust": "use", "source": "s",
    }  # fmt: skip
    return json.dumps([row | changes])


def test_a_setting_that_says_too_little_is_skipped(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "rows.json"
    path.write_text(_row(id="tf-05", setting={"D": 8192}))
    (row,) = validate_questions(path)
    assert row.ours is None and row.skipped == "its setting does not say L"
    path.write_text(_row())
    assert validate_questions(path)[0].ours == pytest.approx(240.5, rel=0.01)


def test_a_fault_of_an_answer_is_not_the_settings(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "rows.json"
    path.write_text(_row())
    monkeypatch.setitem(ANSWERS, "roof-01", lambda setting: {"v5p": 1.0}[setting["chip"]])
    assert validate_questions(path)[0].skipped == "no answer follows from its setting: KeyError 'v5e'"
    path.write_text(_row(id="shard-01", setting={"mesh": {"X": 2}}))
    assert validate_questions(path)[0].skipped == "its setting does not say Y"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not JSON"),
        ("{}", "holds no list of rows"),
        ('[{"id": "x"}]', "row 0 of the worked questions misses answer, kind, setting, source, tolerance, trust, unit"),
        ("[3]", "row 0 of the worked questions misses"),
        (_row(setting=3), r"row 0 \(roof-01\): setting is 3, expected an object"),
        (_row(answer="240"), r"row 0 \(roof-01\): answer is '240', expected a number"),
        (_row(answer=0.0), r"row 0 \(roof-01\): answer is 0, expected another number"),
        (_row(tolerance=None), r"row 0 \(roof-01\): tolerance is None, expected a number"),
    ],
)
def test_wrong_file(tmp_path: pathlib.Path, text: str, message: str) -> None:
    path = tmp_path / "rows.json"
    path.write_text(text)
    with pytest.raises(UserError, match=message):
        validate_questions(path)


def test_missing_file(tmp_path: pathlib.Path) -> None:
    with pytest.raises(UserError, match="none.json cannot be read"):
        validate_questions(tmp_path / "none.json")


@pytest.mark.parametrize(
    ("decoder", "billions"),
    [
        # Published sizes.
        (Decoder(32, 4096, 14336, 32, 8, 128, 128256), 8.03),
        (Decoder(80, 8192, 28672, 64, 8, 128, 128256), 70.55),
        (Decoder(40, 5120, 13824, 40, 40, 128, 32000), 13.02),
        (Decoder(48, 6144, 24576, 24, 24, 256, 32768, gated=False), 22.15),
        (Decoder(32, 4096, 14336, 32, 8, 128, 32000, experts=8, active_experts=2), 46.70),
        (Decoder(48, 1600, 6400, 25, 25, 64, 50257, gated=False, tied=True), 1.555),
    ],
)
def test_parameters_of_known_models(decoder: Decoder, billions: float) -> None:
    assert decoder.params == pytest.approx(billions * 1e9, rel=0.002)


def test_decoder_flops() -> None:
    decoder = Decoder(2, 64, 256, 4, 2, 16, 1000, gated=False)
    layer = 64 * 16 * (2 * 4 + 2 * 2) + 2 * 64 * 256
    assert decoder.matmul_params == 2 * layer + 1000 * 64
    assert decoder.forward_flops(10) == 20 * decoder.matmul_params
    assert decoder.train_flops(10, 128) == pytest.approx(60 * decoder.matmul_params + 10 * 3 * 4 * 128 * 64 * 2 / 2)
    assert decoder.kv_bytes(100) == 2 * 100 * 2 * 2 * 16 * 2
    assert train_state_bytes(10) == 100


def test_unknown_intermediate() -> None:
    with pytest.raises(UserError, match="a decoder layer has no intermediate 'gate'; it has input, normed, query"):
        Decoder(1, 8, 8, 1, 1, 8, 8, gated=False).saved_bytes(1, ["gate"])
