import pytest

from moe.analysis import read_history
from moe.errors import UserError


@pytest.fixture
def path(tmp_path):
    return tmp_path / "load.jsonl"


def test_steps_become_rows(path, line):
    path.write_text(
        line(10, [[3, 1], [2, 2]]) + line(20, [[2, 2], [4, 0]], kept_YE=[[2, 2], [3, 0]])
    )
    history = read_history(path)["decoder"]
    assert history.rows == (10, 20)
    assert history.assigned_RYE[:, 0].tolist() == [[3, 1], [2, 2]]
    assert history.drop_rate_RY.tolist() == [[0, 0], [0, 0.25]]
    assert history.num_tokens_RY.tolist() == [[2, 2], [2, 2]]


def test_a_run_without_a_log_has_no_history(path):
    assert read_history(path) == {}
    path.write_text("")
    assert read_history(path) == {}


@pytest.mark.parametrize("cut", [1, 20, 60])
def test_the_truncated_last_line_of_a_killed_run_is_ignored(path, line, cut):
    path.write_text(line(10, [[3, 1]]) + line(20, [[2, 2]])[:cut])
    assert read_history(path)["decoder"].rows == (10,)


def test_a_complete_last_line_counts_without_its_newline(path, line):
    path.write_text(line(10, [[3, 1]]) + line(20, [[2, 2]]).rstrip())
    assert read_history(path)["decoder"].rows == (10, 20)


def test_steps_that_a_resumed_run_repeats_count_once_as_logged_last(path, line):
    path.write_text(line(10, [[3, 1]]) + line(20, [[9, 9]]) + line(20, [[2, 2]]))
    history = read_history(path)["decoder"]
    assert history.rows == (10, 20)
    assert history.assigned_RYE[1, 0].tolist() == [2, 2]


@pytest.mark.parametrize(
    ("bad", "why"),
    [
        ("{oops", "JSONDecodeError"),
        ("[1, 2]", "TypeError"),
        ('{"step": 5}', "KeyError: 'stacks'"),
        ('{"step": 5, "stacks": {"decoder": {"assigned": [[1, 2]]}}}', "KeyError: 'kept'"),
    ],
)
def test_a_malformed_line_is_named_by_its_number(path, line, bad, why):
    path.write_text(line(10, [[3, 1]]) + bad + "\n" + line(20, [[3, 1]]))
    with pytest.raises(UserError) as error:
        read_history(path)
    assert "load.jsonl line 2 must be the load of one step" in str(error.value)
    assert why in str(error.value)
    assert "Remove that line." in str(error.value)


def test_a_line_of_another_model_is_a_user_error(path, line):
    path.write_text(line(10, [[3, 1]]) + line(20, [[3, 1, 0]]))
    with pytest.raises(UserError, match=r"line 2 .*\(1, 3\).* after .*\(1, 2\)"):
        read_history(path)


def test_more_kept_than_assigned_is_a_user_error(path, line):
    path.write_text(line(10, [[3, 1]], kept_YE=[[4, 1]]))
    with pytest.raises(UserError, match=r"line 1 .*kept must lie between 0 and assigned"):
        read_history(path)
