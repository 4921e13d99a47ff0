"""What a report calls unusual, and what it does not."""

from pathlib import Path

import numpy as np
import pytest
import torch

from hiddentap.capture.report import notices, survey
from hiddentap.capture.report.verdict import headline
from hiddentap.models.errors import RunError, UsageError


def _found(path: Path, **given: int) -> list[tuple[str, str]]:
    return [(notice.weight, notice.found) for notice in notices(survey(path, **given))]


def test_an_ordinary_folder_has_nothing_unusual_for_all_its_large_first_tokens(make_folder) -> None:
    path = make_folder()
    assert _found(path) == []
    assert headline([]) == "Nothing unusual."
    first = survey(path).profile
    assert np.median(first.states[0].norms[first.first]) > 50 * np.median(first.states[0].norms[~first.first])


def test_the_numbers_of_a_survey_are_those_of_the_rows(make_folder) -> None:
    rows = {}

    def keep(columns, number: int) -> None:
        rows[number] = torch.cat([columns["aux_hidden_states"], columns["pre_norm"][:, None]], 1).double().numpy()

    seen = survey(make_folder(keep))
    exact = np.concatenate([rows[number] for number in sorted(rows)])
    inner = np.concatenate([rows[number][1:] for number in sorted(rows)])
    assert [state.state.label for state in seen.profile.states] == ["layer 1", "layer 4", "layer 7", "pre-norm"]
    for slot, state in enumerate(seen.profile.states):
        np.testing.assert_allclose(state.norms, np.linalg.norm(exact[:, slot], axis=-1), rtol=1e-6)
        np.testing.assert_allclose(state.variances, inner[:, slot].var(0), rtol=1e-6)
        np.testing.assert_allclose(state.mean_abs, np.abs(inner[:, slot]).mean(0), rtol=1e-6)
    one, other = exact[:, 1], exact[:, 2]
    cosines = (one * other).sum(-1) / np.linalg.norm(one, axis=-1) / np.linalg.norm(other, axis=-1)
    np.testing.assert_allclose(seen.profile.pairs[1].cosines, cosines, rtol=1e-6)
    assert (seen.rows, seen.rows_read, len(seen.places), seen.read_all) == (287, 287, 12, True)


def _nan_row(columns, number: int) -> None:
    if number == 4:
        columns["pre_norm"][2, 5] = torch.nan


def _zero_rows(columns, number: int) -> None:
    if number == 4:
        columns["aux_hidden_states"][3:5, 1] = 0


def _repeated_row(columns, number: int) -> None:
    if number == 7:
        columns["aux_hidden_states"][6, 2] = columns["aux_hidden_states"][5, 2]


def _copied_layer(columns, number: int) -> None:
    columns["aux_hidden_states"][:, 2] = columns["aux_hidden_states"][:, 1]


def _near_copy(columns, number: int) -> None:
    columns["aux_hidden_states"][:, 2] = columns["aux_hidden_states"][:, 1] * 1.0001
    columns["aux_hidden_states"][:, 2, 0] += 0.001


def _dead_dimensions(columns, number: int) -> None:
    columns["aux_hidden_states"][:, 0, [2, 11]] = 0.25


def _one_direction(columns, number: int) -> None:
    columns["pre_norm"][:, :] = columns["pre_norm"] * 0.03 + torch.arange(1.0, 17.0)


def _other_model(columns, number: int) -> None:
    if number in (2, 9):
        columns["aux_hidden_states"][:, 1] *= 20


def _unmasked(columns, number: int) -> None:
    columns["loss_mask"][:] = 0
    columns["loss_mask"][-1] = number == 0


def _some_unmasked(columns, number: int) -> None:
    if number in (1, 5):
        columns["loss_mask"][:] = 0


SPOILT = [
    (_nan_row, "wrong", "pre-norm: 1 of 287 (0.3 %) rows hold values that are not finite."),
    (_zero_rows, "wrong", "layer 4: 2 of 287 (0.7 %) rows hold zeros alone."),
    (
        _repeated_row,
        "wrong",
        "layer 7: 1 of 287 (0.3 %) rows equal the row before, although another token stands there.",
    ),
    (_copied_layer, "wrong", "layer 4 and layer 7 are equal in 275 of 287 (95.8 %) rows."),
    (_near_copy, "look", "layer 4 and layer 7 have a median cosine of 1.000000."),
    (_dead_dimensions, "look", "layer 1: 2 of 16 (12.5 %) dimensions have one value in all rows (2, 11)."),
    (_one_direction, "look", "pre-norm: the mean cosine between two tokens is 0.999"),
    (_other_model, "look", "layer 4: 2 of 12 (16.7 %) samples have norms more than 3 times above or below the others"),
    (_unmasked, "look", "The loss mask marks 0.35 % of the tokens."),
    (_some_unmasked, "look", "2 of 12 (16.7 %) samples have no token that the loss mask marks."),
]


@pytest.mark.parametrize(("spoil", "weight", "text"), SPOILT, ids=[spoil.__name__[1:] for spoil, _, _ in SPOILT])
def test_each_fault_is_found_with_its_numbers(make_folder, spoil, weight: str, text: str) -> None:
    found = _found(make_folder(spoil))
    assert [entry for entry in found if entry[0] == weight and entry[1].startswith(text)], found


def test_norms_that_jump_name_the_samples(make_folder) -> None:
    ((_, found),) = [entry for entry in _found(make_folder(_other_model)) if "norms" in entry[1]]
    assert "'s2' (" in found
    assert "'s9' (" in found
    assert "'s0'" not in found


def test_the_last_layer_and_the_norms_input_may_be_one_state(make_folder) -> None:
    def one_state(columns, number: int) -> None:
        columns["pre_norm"] = columns["aux_hidden_states"][:, 2].clone()

    taps = {
        "layer_ids": [1, 4, 8], "boundaries": [2, 5, 9], "convention": "layer_output", "num_hidden_layers": 9,
        "hidden_size": 16,
    }  # fmt: skip
    assert _found(make_folder(one_state, about={"taps": taps})) == []
    taps = taps | {"num_hidden_layers": 10}
    assert "layer 8 and pre-norm are equal" in _found(make_folder(one_state, name="two", about={"taps": taps}))[0][1]


def test_many_cut_samples_are_found_by_the_limit_of_the_run(make_folder) -> None:
    about = {"tokenisation": {"max_length": 40}}
    path = make_folder(lengths=(40,) * 4 + (12, 20, 31, 33), about=about)
    assert _found(path) == [("look", "4 of 8 (50.0 %) samples were cut at 40 tokens.")]


def test_equal_lengths_are_found(make_folder) -> None:
    assert _found(make_folder(lengths=(32,) * 12)) == [("look", "All 12 samples have 32 tokens.")]


def test_many_rejects_are_found_with_the_most_frequent_reason(make_folder) -> None:
    assert _found(make_folder(rejected=1)) == [
        ("look", "1 of 13 (7.7 %) input rows were rejected, 1 of them for: empty_answer.")
    ]


def test_an_incomplete_folder_says_so(make_folder) -> None:
    assert _found(make_folder(complete=False)) == [
        ("look", "The capture is not complete: 12 samples are sealed so far.")
    ]


def test_a_damaged_shard_is_found_and_the_others_are_read(make_folder) -> None:
    path = make_folder()
    shard = path / "shards/shard-000001.safetensors"
    shard.write_bytes(shard.read_bytes()[:-10])
    seen = survey(path)
    ((weight, found),) = [(notice.weight, notice.found) for notice in notices(seen)]
    assert weight == "wrong"
    assert str(shard) in found
    assert len(seen.lengths) == 6


def test_wrong_things_come_first_and_are_counted_apart(make_folder) -> None:
    found = notices(survey(make_folder(_nan_row, complete=False)))
    assert [notice.weight for notice in found] == ["wrong", "look"]
    assert headline(found) == "1 thing that cannot be right and 1 thing to look at."


def test_folders_that_cannot_be_surveyed_are_refused(make_folder, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is not there; expected the folder of a capture"):
        survey(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, match="holds no sealed shard"):
        survey(tmp_path / "empty")

    def lose_pre_norm(columns, number: int) -> None:
        if number >= 6:
            del columns["pre_norm"]

    with pytest.raises(RunError, match="hold different columns; a report needs shards of one run"):
        survey(make_folder(lose_pre_norm))


def test_rows_beyond_the_limit_are_left_out_and_lengths_are_not(make_folder) -> None:
    seen = survey(make_folder(), max_rows=100)
    assert (len(seen.places), seen.rows_read, seen.rows, len(seen.lengths)) == (4, 68, 287, 12)
    assert not seen.read_all
