"""The lines of a report: one a kind of finding, however many there are."""

from pathlib import Path

from hiddentap.capture.store import Finding
from hiddentap.capture.verify import Report


def lines(*findings: Finding) -> list[str]:
    return list(Report(Path("/out"), findings, 1, 1, 1, 0, None, (), ()).faults())


def error(file: str, sample: str | None, tensor: str | None, what: str) -> Finding:
    return Finding(f"/out/{file}", sample, tensor, what, "error")


def test_a_thousand_findings_of_one_kind_are_one_line_with_a_count_and_the_first_places() -> None:
    found = [
        error(
            f"shards/{i // 500}", f"s{i}", "pre_norm", f"non-finite values in {i} of its tokens, first at token {i * 7}"
        )
        for i in range(1000)
    ]
    assert lines(*found) == [
        "error: shards/0: sample 's0', pre_norm: non-finite values in 0 of its tokens, first at token 0 (999 more like this "
        "in 2 files: sample 's1' of shards/0, sample 's2' of shards/0, sample 's3' of shards/0, ...)"
    ]


def test_checksums_sizes_and_details_do_not_make_a_kind() -> None:
    sums = [
        error("a", f"s{i}", "input_ids", f"checksum {i:08x}, 0badcafe was sealed: its bytes changed") for i in (0, 1)
    ]
    sizes = [error(f"s{i}", None, None, f"missing; the manifest lists it with {i} bytes") for i in (5, 6)]
    details = [error(f"s{i}", "x", "pre_norm", f"not the model's rows: largest error 0.{i}") for i in (5, 6)]
    paths = [error(f"s{i}", None, None, f"/out/s{i}: its header has {i} bytes") for i in (5, 6)]
    assert [line.count("1 more like this") for line in lines(*sums, *sizes, *details, *paths)] == [1, 1, 1, 1]


def test_other_tensors_layers_slots_and_severities_are_other_kinds() -> None:
    found = [
        error("a", "x", "pre_norm", "all-zero rows in 3 of its tokens at slot 0"),
        error("a", "x", "post_norm", "all-zero rows in 3 of its tokens at slot 0"),
        error("a", "x", "post_norm", "all-zero rows in 3 of its tokens at slot 1"),
        error("a", "x", "aux", "stored layer 0 matches boundary 2, not 1 as declared"),
        error("a", "x", "aux", "stored layer 1 matches boundary 1, not 2 as declared"),
        Finding("/out/a", "x", "aux", "stored layer 1 matches boundary 1, not 2 as declared", "warning"),
    ]
    assert len(lines(*found)) == 6


def test_findings_that_differ_in_their_file_alone_share_their_words() -> None:
    found = [error(f"shards/{i}", None, None, "left by a killed run") for i in range(5)]
    assert lines(*found) == ["error: shards/0, shards/1, shards/2 and 2 more files: left by a killed run"]
