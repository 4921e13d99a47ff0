"""The page and its pictures, as files and in a browser."""

import json
import re
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from hiddentap.capture.report import Notice, Report, survey, write_report
from hiddentap.capture.report.page import page
from hiddentap.models.errors import UsageError

OFFLINE = ["norms", "variance", "cosine", "outliers", "lengths", "loss-mask"]


def _size(png: bytes) -> tuple[int, int]:
    assert png[:8] == b"\x89PNG\r\n\x1a\n"
    return struct.unpack(">II", png[16:24])


@pytest.fixture(scope="module")
def ordinary(folder_in, tmp_path_factory: pytest.TempPathFactory) -> Report:
    """The report of a folder with nothing unusual; tests do not change it."""
    parent = tmp_path_factory.mktemp("ordinary")
    return write_report(folder_in(parent), parent / "r/page.html", parent / "pictures")


def test_a_report_is_one_page_and_a_png_for_each_figure(ordinary: Report) -> None:
    report = ordinary
    assert [path.stem for path in report.pngs] == OFFLINE
    for path in report.pngs:
        width, height = _size(path.read_bytes())
        assert width == 1080
        assert height >= 400
    assert report.html.name == "page.html"
    html = report.html.read_text(encoding="utf-8")
    assert re.findall(r'<figure id="([a-z-]+)">', html) == OFFLINE
    assert "<h2>Nothing unusual.</h2>" in html
    assert "All 287 rows were read." in html


def test_without_a_folder_for_pictures_there_is_the_page_alone(make_folder, tmp_path: Path) -> None:
    report = write_report(make_folder(), tmp_path / "only/page.html")
    assert report.pngs == ()
    assert [path.name for path in (tmp_path / "only").iterdir()] == ["page.html"]


def test_the_page_loads_nothing_from_elsewhere(ordinary: Report) -> None:
    html = ordinary.html.read_text(encoding="utf-8")
    sources = re.findall(r'(?:src|srcset|href)="([^"]*)"', html)
    assert len(sources) == 2 * len(OFFLINE)
    assert all(source.startswith("data:image/png;base64,") for source in sources)
    assert "<script" not in html
    assert "url(" not in html


def test_text_of_the_input_is_text_on_the_page(make_folder) -> None:
    about = {"model": {"id": "<script>alert(1)</script>", "class": "A & B"}}
    html = page(survey(make_folder(about=about)), [Notice("look", "<b>found", "`run --x` & look")], [])
    assert "&lt;b&gt;found</strong><br><code>run --x</code> &amp; look" in html
    assert "&lt;script&gt;alert(1)&lt;/script&gt; (A &amp; B)" in html
    assert "<script" not in html


def test_a_page_of_few_samples_says_how_many_rows_it_speaks_of(make_folder) -> None:
    html = page(survey(make_folder(), max_rows=100), [], [])
    assert "68 of 287 rows were read: those of 4 samples spread evenly over all 12." in html


def _worst(columns, number: int) -> None:
    """Everything that could upset an axis: a state of zeros, one of NaN."""
    columns["aux_hidden_states"][:, 0] = 0
    columns["pre_norm"][:] = float("nan")


@pytest.mark.filterwarnings("error")
def test_figures_of_zeros_and_nan_are_drawn_without_a_warning(make_folder, tmp_path: Path) -> None:
    report = write_report(make_folder(_worst), tmp_path / "p.html", tmp_path)
    assert [path.stem for path in report.pngs] == OFFLINE
    assert report.notices[0].weight == "wrong"


@pytest.mark.filterwarnings("error")
def test_the_smallest_folder_is_drawn_without_a_warning(make_folder, tmp_path: Path) -> None:
    def one_state(columns, number: int) -> None:
        del columns["pre_norm"], columns["loss_mask"]
        columns["aux_hidden_states"] = columns["aux_hidden_states"][:, :1].clone()

    report = write_report(make_folder(one_state, lengths=(1,), about={"model": "m"}), tmp_path / "p.html", tmp_path)
    assert [path.stem for path in report.pngs] == ["norms", "variance", "outliers", "lengths"]
    assert report.notices == []


def test_a_page_that_cannot_be_written_is_a_clear_error(make_folder, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match=r"page\.html cannot be made, because .*file is a file; choose another"):
        write_report(make_folder(), tmp_path / "file/page.html")


def test_without_matplotlib_the_extra_is_named(make_folder, tmp_path: Path, monkeypatch) -> None:
    for name in [name for name in sys.modules if name.startswith("hiddentap.capture.report.")]:
        if name.rsplit(".", 1)[1] in ("page", "figures", "drawing") or name.endswith("_figures"):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(UsageError, match=r"a report needs matplotlib: pip install 'hiddentap\[report\]'"):
        write_report(make_folder(), tmp_path / "p.html")
    assert not (tmp_path / "p.html").exists()


def test_the_report_package_is_imported_without_matplotlib() -> None:
    script = "import sys, hiddentap.capture.report; sys.exit('matplotlib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0


@pytest.fixture(scope="module")
def browser() -> str:
    for name in ("chromium", "chromium-browser", "google-chrome"):
        if found := shutil.which(name):
            return found
    pytest.skip("no chromium or chrome on PATH to open the page in")


# Runs in the page itself: what a person would see of it.
_MEASURE = """
<script>addEventListener("load", () => {
  document.title = JSON.stringify({
    images: [...document.images].map(image => [image.naturalWidth, image.naturalHeight]),
    widest: document.documentElement.scrollWidth, window: innerWidth,
    sources: [...document.images].map(image => image.currentSrc === image.src ? "light" : "dark"),
    face: getComputedStyle(document.body).backgroundColor,
    headings: [...document.querySelectorAll("h1, h2")].map(heading => heading.textContent),
  });
});</script></body>"""


def _open(browser: str, page: Path, tmp_path: Path, *options: str) -> dict:
    policy = re.compile(r'<meta http-equiv="Content-Security-Policy"[^>]*>')
    html = page.read_text(encoding="utf-8")
    assert policy.search(html)
    measured = tmp_path / "measured.html"
    measured.write_text(policy.sub("", html).replace("</body>", _MEASURE), encoding="utf-8")
    command = [
        browser, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}",
        "--virtual-time-budget=10000", *options, "--dump-dom", measured.as_uri(),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    title = re.search(r"<title>(.*?)</title>", done.stdout, re.DOTALL)
    assert title is not None, done.stderr
    return json.loads(title.group(1).replace("&quot;", '"').replace("&amp;", "&"))


@pytest.mark.parametrize(
    ("options", "source", "face"),
    [
        (["--window-size=1000,900"], "light", "rgb(255, 255, 255)"),
        (["--window-size=1000,900", "--blink-settings=preferredColorScheme=0"], "dark", "rgb(20, 24, 29)"),
        (["--window-size=500,900"], "light", "rgb(255, 255, 255)"),
    ],
    ids=["light", "dark", "narrow"],
)
def test_a_browser_shows_every_figure_and_nothing_sticks_out(
    browser: str, ordinary: Report, tmp_path: Path, options: list[str], source: str, face: str
) -> None:
    seen = _open(browser, ordinary.html, tmp_path, *options)
    assert len(seen["images"]) == len(OFFLINE)
    assert all(width == 1080 and height >= 400 for width, height in seen["images"])
    assert set(seen["sources"]) == {source}
    assert seen["face"] == face
    assert seen["widest"] <= seen["window"]
    assert seen["headings"][:3] == ["Report of out", "Nothing unusual.", "Norms per layer"]


def test_the_page_as_it_is_lets_nothing_in_and_paints_its_figures(
    browser: str, ordinary: Report, tmp_path: Path
) -> None:
    shot = tmp_path / "shot.png"
    command = [
        browser, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}",
        "--enable-logging=stderr", "--hide-scrollbars", "--window-size=1000,3600", f"--screenshot={shot}", ordinary.html.as_uri(),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert "CONSOLE" not in done.stderr
    from matplotlib.image import imread

    pixels = imread(shot)[..., :3]
    blue = (abs(pixels - (0x00 / 255, 0x72 / 255, 0xB2 / 255)).max(-1) < 0.01).sum()
    assert blue > 5000
