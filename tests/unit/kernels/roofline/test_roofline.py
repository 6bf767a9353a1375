"""Rooflines: points of known numbers, formulas of the operators, and what the READMEs and the picture show of them."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch

from kernels.block_attention.reference import visible
from kernels.block_attention.window import Window
from kernels.gpu_check import __main__ as command
from kernels.gpu_check.cases import all_checks
from kernels.roofline import EPYC_CORE, H200_SXM, Device, Work, counts, device_called
from kernels.roofline.pages import BEGIN, COMMAND, END, pages, with_section, write
from kernels.roofline.picture import draw
from kernels.roofline.tables import Table, all_tables, lines, roofs

ROUND = Device("a round one", "Round", {"bf16": 100.0, "fp32": 10.0}, 10.0, "made up")


@pytest.fixture(scope="module")
def tables() -> dict[str, Table]:
    return all_tables()


@pytest.mark.parametrize(
    ("work", "bound", "least_s", "rate"),
    [
        (Work(1_000.0, 10.0), "compute", 10.0, 100.0),
        (Work(50.0, 10.0), "memory", 1.0, 50.0),
        (Work(100.0, 10.0), "memory", 1.0, 100.0),
        (Work(50.0, 10.0, "fp32"), "compute", 5.0, 10.0),
        (Work(0.0, 10.0), "memory", 1.0, 0.0),
    ],
)
def test_a_point_lies_under_the_lower_roof(work: Work, bound: str, least_s: float, rate: float) -> None:
    point = ROUND.point(work)
    assert (point.bound, point.least_s, point.flops_per_s) == (bound, least_s, rate)
    assert point.share(4 * least_s) == 0.25
    assert ROUND.ridge("bf16") == 10.0


def test_numbers_that_make_no_sense_are_refused() -> None:
    for flops, num_bytes in ((-1.0, 1.0), (1.0, 0.0), (float("nan"), 1.0), (1.0, float("nan"))):
        with pytest.raises(ValueError, match="bytes above 0"):
            Work(flops, num_bytes)
    with pytest.raises(ValueError, match="precision must be one of bf16, fp32 on a round one, is 'fp8'"):
        ROUND.point(Work(1.0, 1.0, "fp8"))
    with pytest.raises(ValueError, match="taken_s must be above 0"):
        ROUND.point(Work(1.0, 1.0)).share(0.0)
    # Nothing is multiplied, so nothing is asked of a unit that is not there.
    assert ROUND.point(Work(0.0, 1.0, "fp8")).bound == "memory"


def test_the_h200_is_that_of_the_data_sheet_and_no_other() -> None:
    assert H200_SXM.ridge("bf16") == pytest.approx(206.04, abs=0.01)
    assert H200_SXM.ridge("fp8") == pytest.approx(412.29, abs=0.01)
    assert device_called("NVIDIA H200") is H200_SXM
    assert device_called("NVIDIA H200 NVL") is None
    assert device_called("") is None


def _linear_bytes(m: int, n: int, k: int) -> int:
    return sum(torch.empty(*shape, dtype=torch.bfloat16).nbytes for shape in ((m, k), (n, k), (m, n)))


@pytest.mark.parametrize(
    ("work", "flops", "num_bytes"),
    [
        (counts.linear(5, 7, 3), 2 * 5 * 7 * 3, _linear_bytes(5, 7, 3)),
        (counts.linear(5, 7, 3, "fp32"), 2 * 5 * 7 * 3, 2 * _linear_bytes(5, 7, 3)),
        (counts.linear(5, 7, 3, "int8"), 2 * 5 * 7 * 3, 2 * 5 * 3 + 7 * 3 + 2 * 5 * 7),
        # With nothing of the request it is a linear; the request half is done once a request.
        (counts.broadcast_gemm(5, 7, 3, 0, 1), 2 * 5 * 7 * 3, _linear_bytes(5, 7, 3)),
        (counts.broadcast_gemm(5, 7, 3, 4, 2), 2 * 7 * (5 * 3 + 2 * 4), _linear_bytes(5, 7, 3) + 2 * (7 * 4 + 2 * 4)),
        (counts.broadcast_token_gemm(5, 7, 3, 4, 2, 1), 2 * 7 * 2 * (5 * 3 + 4), 2 * (30 + 7 * 7 + 8 + 70)),
        (counts.fm_block(1000, 32, 16, 64, 1), 131_072_000, 1000 * 32 * 80 * 2 + 16 * 64 * 4),
        (counts.broadcast_attention(6, 2, 3, 4, (5, 9)), 4 * 6 * 2 * 3 * 4 * 7, 2 * (2 * 6 * 2 * 12 + 2 * 14 * 12)),
        (counts.jagged_attention((3, 0, 1), 2, 4, causal=False), 4 * 10 * 8, 2 * 4 * 4 * 8),
        (counts.jagged_attention((3, 0, 1), 2, 4, causal=True), 4 * 7 * 8, 2 * 4 * 4 * 8),
        (counts.gdpa(2048, 1, 256, 64, 1), 134_217_728, 4 * 64 * (2048 + 256)),
        (counts.jagged_norm(10, 4), 240, 320),
        (counts.norm_quantize(10, 4), 160, 120),
        (counts.grouped_gemm((500,) * 100, 64, 64), 409_600_000, 13_619_200),
        (counts.linear_batch(((5, 7, 3), (1, 2, 3))), 222, _linear_bytes(5, 7, 3) + _linear_bytes(1, 2, 3)),
        (counts.segmented_topk((7, 3), 5, with_tie_keys=True), 0, 12 * 10 + 8 * 8),
        (counts.segmented_topk((7, 3), 5, with_tie_keys=False), 0, 4 * 10 + 8 * 8),
    ],
)
def test_work_of_known_shapes(work: Work, flops: float, num_bytes: float) -> None:
    assert (work.flops, work.num_bytes) == (flops, num_bytes)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("length", "block", "window_blocks"), [(256, 32, 2), (250, 32, 3), (31, 32, 2), (0, 32, 1)])
def test_pairs_of_a_window_are_those_that_the_reference_sees(
    length: int, block: int, window_blocks: int, causal: bool
) -> None:
    seen = int(visible(length, Window(block, window_blocks, causal, "softmax", 1.0)).sum())
    assert counts.window_pairs(length, block, window_blocks, causal=causal) == seen


def test_a_stack_counts_what_its_readme_says() -> None:
    plain = counts.StackSizes(6, 32, 64, 16, 512, 16, 16)
    assert counts.wukong_stack(1, plain).flops == 10_616_832
    reading = counts.StackSizes(6, 32, 64, 16, 512, 16, 16, queries=2, keys=2_048)
    assert counts.wukong_stack(1, reading).flops == 17_424_384
    one, two = (counts.wukong_stack(c, plain) for c in (1, 2))
    # A further candidate brings its tokens in and out; weights and the request's part are there already.
    assert two.num_bytes - one.num_bytes == 2 * 2 * 32 * 64
    assert one.precision == "bf16"


def test_what_the_readmes_and_the_picture_show_is_what_the_shapes_give(tables: dict[str, Table]) -> None:
    stale = [str(path) for path, text in pages(tables).items() if path.read_text(encoding="utf-8") != text]
    assert not stale, f"run {COMMAND}"


def test_every_real_shape_of_the_gpu_check_is_shown_once(tables: dict[str, Table]) -> None:
    shown = [work for table in tables.values() if table.device is H200_SXM for work in table.works.values()]
    assert len(shown) == sum(check.is_timed for check in all_checks())
    assert {name for name, table in tables.items() if table.device is EPYC_CORE} == {
        "block_attention", "event_layer", "native", "search", "wukong_layer",
    }  # fmt: skip


def test_a_kernel_without_shapes_is_an_error() -> None:
    with pytest.raises(ValueError, match="every kernel needs shapes for its roofline, gdpa has none"):
        all_tables(check for check in all_checks() if check.op != "gdpa")


def test_shapes_without_a_readme_are_an_error(tables: dict[str, Table], tmp_path: Path) -> None:
    for name in tables:
        if name != "fm_block":
            (tmp_path / name).mkdir()
            (tmp_path / name / "README.md").write_text("")
    with pytest.raises(ValueError, match="fm_block has none"):
        all_tables(folder=tmp_path)


def test_only_the_section_of_a_readme_is_renewed(tmp_path: Path) -> None:
    table = Table(ROUND, {"small": Work(50.0, 10.0), "none": Work(0.0, 1e7)})
    path = tmp_path / "op" / "README.md"
    path.parent.mkdir()
    path.write_text(f"# op\n\n{BEGIN}\nold\n{END}\n\n## Measured\n")
    new = with_section(path.read_text(), table, "op")
    assert new.startswith(f"# op\n\n{BEGIN}\nWhat a round one allows at best: bf16")
    assert new.endswith(f"{END}\n\n## Measured\n")
    assert "old" not in new
    assert re.search(r"^\| none \| 0 \| 10 \| 0 \| memory \| .* \| - \|$", new, re.MULTILINE)
    assert write({path: new}) == [path]
    assert write({path: new}) == []
    assert with_section(new, table, "op") == new


@pytest.mark.parametrize("text", ["", BEGIN, END, f"{END}{BEGIN}", f"{BEGIN}{END}{BEGIN}{END}", f"{BEGIN}{BEGIN}{END}"])
def test_a_readme_with_no_place_for_its_roofline_is_an_error(text: str) -> None:
    with pytest.raises(ValueError, match="op must have one line"):
        with_section(text, Table(ROUND, {"small": Work(50.0, 10.0)}), "op")


def test_the_picture_has_every_kernel_and_a_mark_for_every_shape_with_flops(tables: dict[str, Table]) -> None:
    root = ElementTree.fromstring(draw(tables, H200_SXM))
    space = "{http://www.w3.org/2000/svg}"
    titles = [circle.findtext(f"{space}title") or "" for circle in root.iter(f"{space}circle")]
    on_gpu = {name: table for name, table in tables.items() if table.device is H200_SXM}
    with_flops = [work for table in on_gpu.values() for work in table.works.values() if work.flops]
    assert len([title for title in titles if title]) == len(with_flops)
    texts = {text.text for text in root.iter(f"{space}text")}
    assert {name for name in on_gpu if name != "segmented_topk"} < texts
    assert {"segmented_topk: no FLOPs", "bf16 989", "fp8, int8 1,979", "fp32 67", "4.8 TB/s"} < texts


def test_the_picture_needs_something_to_draw() -> None:
    with pytest.raises(ValueError, match="a picture needs FLOPs"):
        draw({"op": Table(ROUND, {"small": Work(0.0, 10.0)})}, ROUND)


def test_roofs_in_words() -> None:
    assert roofs(H200_SXM, {"fp8"}) == "fp8 1,979 TFLOP/s (from 412 FLOP/B on), memory 4.8 TB/s"
    assert roofs(EPYC_CORE, set()) == "memory 24 GB/s"
    text = "\n".join(lines({"op": Table(H200_SXM, {"small": Work(4.8e9, 4.8e6)})}))
    assert "op small" in text
    assert text.split()[-7:] == ["4.8", "4.8", "1,000", "compute", "4.85", "989", "TFLOP/s"]


def test_the_command_prints_rooflines_without_a_gpu(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert command.main(["--roofline", "--only", "gdpa"]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in printed[1:]] == ["shape", *["gdpa"] * 4]
    assert command.main(["--roofline", "--only", "nothing"]) == 1
    assert "no kernel's name starts with 'nothing'; there are block_attention, " in capsys.readouterr().err
    for wrong in (["--write"], ["--roofline", "--write", "--only", "gdpa"]):
        with pytest.raises(SystemExit):
            command.main(wrong)
