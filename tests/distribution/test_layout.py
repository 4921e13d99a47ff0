import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

from support.source_copy import ROOT

NOT_THE_PACKAGE = {"tests", "scripts", "build", "dist", "demo-out"}


def package_folders() -> set[Path]:
    """Every folder below the root that holds Python and belongs to the package, the root itself included."""
    tops = [
        path for path in ROOT.iterdir() if path.is_dir() and path.name[0] != "." and path.name not in NOT_THE_PACKAGE
    ]
    return {ROOT} | {module.parent for top in tops for module in top.rglob("*.py")}


def test_every_folder_with_python_in_it_is_listed_as_a_package() -> None:
    with (ROOT / "pyproject.toml").open("rb") as file:
        listed = tomllib.load(file)["tool"]["setuptools"]["packages"]
    found = {".".join(("hiddentap", *folder.relative_to(ROOT).parts)) for folder in package_folders()}
    assert sorted(listed) == sorted(found)


def test_every_package_folder_has_its_init() -> None:
    assert [folder for folder in package_folders() if not (folder / "__init__.py").is_file()] == []


def test_test_folders_are_no_packages() -> None:
    assert list((ROOT / "tests").rglob("__init__.py")) == []


def test_no_test_folder_bears_the_name_of_an_installed_package() -> None:
    # Tests run in importlib mode: pytest enters the module `packaging` for a folder tests/packaging and hides the real one.
    folders = {path.name for path in (ROOT / "tests").iterdir() if path.is_dir()}
    assert folders & set(packages_distributions()) == set()
