import gzip
import json

import numpy as np
import pytest
from hypothesis import given, settings
from random_problems import brute_force, make_problem, problems

from autoshard.errors import UserError
from autoshard.solver import evaluate, read_contest, solve, write_contest


def good() -> dict:
    return {
        "problem": {
            "name": "small",
            "nodes": {"intervals": [[0, 3], [1, 2]], "costs": [[1, 2], [3]], "usages": [[5, 0], [6]]},
            "edges": {"nodes": [[0, 1]], "costs": [[7, 8]]},
            "usage_limit": 8,
        }
    }


def at(path: str, value: object) -> dict:
    data = good()
    *way, last = ["problem", *path.split(".")]
    place = data
    for key in way:
        place = place[key]
    if value is None:
        del place[last]
    else:
        place[last] = value
    return data


@settings(max_examples=60, deadline=None)
@given(problem=problems(most_nodes=4))
def test_round_trip_keeps_the_problem(problem, tmp_path_factory):
    path = tmp_path_factory.mktemp("contest") / "p.json.gz"
    write_contest(problem, path)
    again = read_contest(path)
    best = brute_force(problem)
    answer = solve(again)
    if best is None:
        assert answer.stats["excess"] > 0 or answer.cost >= 10**18
    else:
        assert answer.cost == best
        judged = evaluate(problem, answer.choices[: problem.num_nodes])
        assert judged.cost == best
        assert judged.feasible


def test_satellites_have_one_alternative_per_usage(tmp_path):
    terms = [(0, 0, 2, [1, 2, 2]), (0, 5, 6, [4, 4, 0])]
    problem = make_problem([[0, 0, 0]], [], terms, 9)
    write_contest(problem, tmp_path / "p.json")
    data = json.loads((tmp_path / "p.json").read_text())["problem"]
    assert data["nodes"]["costs"] == [[0, 0, 0], [0, 0]]
    assert data["nodes"]["usages"] == [[1, 2, 2], [0, 4]]
    assert data["edges"] == {"nodes": [[0, 1]], "costs": [[10**18, 0, 10**18, 0, 0, 10**18]]}


def test_bytes_are_the_same_each_time(tmp_path):
    problem = make_problem([[0, 1]], [], [(0, 0, 2, [1, 2])], 9)
    for name in ("a.json.gz", "b.json.gz"):
        write_contest(problem, tmp_path / name)
    assert (tmp_path / "a.json.gz").read_bytes() == (tmp_path / "b.json.gz").read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.json.gz", "b.json.gz"]


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        (at("nodes", None), "problem has no key 'nodes'; a contest problem needs it"),
        (at("edges", []), "'edges' in problem is list; it must be an object"),
        (at("nodes.costs", [[1, 2], []]), "node 1 has no alternatives; every node needs at least one"),
        (at("nodes.usages", [[5], [6]]), "memory term 0 of node 0 has 1 usages, but the node has 2 alternatives"),
        (at("nodes.costs", [[1, 2], 3]), "node 1 has costs 3; a list of whole numbers is needed"),
        (at("nodes.costs", [[1, 2.5], [3]]), "node 0 has 2.5 among its costs; only whole numbers are allowed"),
        (at("nodes.costs", [[1, True], [3]]), "node 0 has True among its costs; only whole numbers are allowed"),
        (at("nodes.costs", [[1, 2], [2**70]]), "among its costs, which does not fit in 64 bits"),
        (at("nodes.costs", [[1, 2], [2**63]]), "node 1 has 9223372036854775808 among its costs, which does not fit"),
        (at("nodes.usages", [[5, -1], [6]]), "node 0 has the usage -1; a usage must be 0 or more bytes"),
        (at("nodes.intervals", [[0, 3]]), "problem.nodes.intervals has 1 entries for 2 nodes; one per node is needed"),
        (at("nodes.intervals", [[0, 3], [1]]), "node 1 has the interval [1]; a pair of whole numbers is needed"),
        (at("nodes.intervals", [[0, 3], [3, 1]]), "node 1 has the interval [3, 1), which ends before it starts"),
        (at("nodes.intervals", [[-1, 3], [0, 1]]), "node 0 has the interval [-1, 3), which starts before time 0"),
        (at("edges.nodes", [[0, 2]]), "edge 0 joins nodes [0, 2], but nodes are numbered 0 to 1"),
        (at("edges.nodes", []), "problem.edges names 0 edges but has 1 lists of costs"),
        (at("edges.costs", [[7]]), "edge 0 has 1 costs, but its nodes [0, 1] have 2 and 1 alternatives, so 2 are"),
        (at("usage_limit", 0), "the usage limit is 0; it must be at least 1 byte, or absent for no limit"),
        (at("usage_limit", "8"), "problem.usage_limit is '8'; it must be a 64-bit whole number, or absent"),
        ({"problem": {"nodes": {"intervals": [], "costs": [], "usages": []}, "edges": {"nodes": [], "costs": []}}},
         "the problem has no nodes; at least one node with one alternative is needed"),
        ([], "the file has no key 'problem'; a contest problem needs it"),
    ],
)  # fmt: skip
def test_bad_files(data, sentence, tmp_path):
    path = tmp_path / "bad.json"
    path.write_text(json.dumps(data))
    with pytest.raises(UserError) as caught:
        read_contest(path)
    assert sentence in str(caught.value)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    ("content", "sentence"),
    [(b"{", "is not JSON"), (gzip.compress(b"{}", mtime=0)[:-4], "is a gzip file that is cut off or damaged")],
)
def test_damaged_files(content, sentence, tmp_path):
    path = tmp_path / "bad.json"
    path.write_bytes(content)
    with pytest.raises(UserError, match=sentence):
        read_contest(path)


def test_a_missing_file(tmp_path):
    with pytest.raises(UserError, match="cannot read the problem .*none.json: No such file or directory"):
        read_contest(tmp_path / "none.json")


def test_evaluate_never_overflows():
    problem = make_problem([[2**62], [2**62], [2**62]], [], [(n, 0, 1, [2**62]) for n in range(3)], 5)
    judged = evaluate(problem, np.zeros(3, dtype=np.int64))
    assert judged.cost == 3 * 2**62
    assert (judged.peak_usage, judged.peak_time, judged.excess) == (3 * 2**62, 0, 3 * 2**62 - 5)
    assert not judged.feasible
