"""A user's own folder: what is found where, what is wrong with it, which part is for testing, who gets what."""

from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from folders import few_labels, save
from hypothesis import given, settings
from hypothesis import strategies as st

from semidfl.config import Config, DataConfig, GraphConfig
from semidfl.data import sources
from semidfl.data.check import check_folder
from semidfl.data.faults import MEND, NOTE, STOP, content_faults, typos
from semidfl.data.folder import Listing, natural, pictures_below, scan
from semidfl.data.own import class_names, held_out, load_folder, load_site, with_sites
from semidfl.data.partition import by_owner, class_counts, partition
from semidfl.errors import DataError

PIXELS = np.arange(64, dtype=np.uint8).reshape(8, 8)


def lay(root: Path, *names: str) -> Path:
    """Pictures of these names, each another."""
    for k, name in enumerate(names):
        save(root / name, PIXELS + k)
    return root


def found(listing: Listing) -> dict[str, str | None]:
    return {listing.name(p): p.label for p in listing.pictures}


# --- layouts ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("word", ["unlabeled", "unlabelled", "Unlabeled"])
def test_a_folder_a_class(tmp_path: Path, word: str) -> None:
    lay(tmp_path, "cat/1.png", "cat/deep/2.PNG", "dog/3.bmp", f"{word}/4.png", "loose.png")
    (tmp_path / "dog" / "notes.txt").write_text("x")
    save(tmp_path / ".hidden" / "5.png", PIXELS)
    save(tmp_path / "cat" / ".6.png", PIXELS)
    listing = scan(tmp_path)
    assert listing.layout == "classes"
    assert found(listing) == {
        "cat/1.png": "cat", "cat/deep/2.PNG": "cat", "dog/3.bmp": "dog", f"{word}/4.png": None, "loose.png": None,
    }  # fmt: skip
    assert listing.classes == ("cat", "dog")
    assert listing.others == ("dog/notes.txt",)


def test_classes_are_sorted_as_people_count(tmp_path: Path) -> None:
    lay(tmp_path, *(f"{k}/x.png" for k in range(12)))
    assert scan(tmp_path).classes == tuple(map(str, range(12)))
    assert sorted(["a10", "a9", "b", "10"], key=natural) == ["10", "a9", "a10", "b"]


def test_classes_can_be_given_in_their_order(tmp_path: Path) -> None:
    lay(tmp_path, "cat/1.png", "dog/2.png")
    assert scan(tmp_path, ("dog", "cow", "cat")).classes == ("dog", "cow", "cat")


def test_train_beside_test(tmp_path: Path) -> None:
    lay(tmp_path, "train/cat/1.png", "train/dog/2.png", "test/cat/3.png", "unlabeled/4.png")
    listing = scan(tmp_path)
    assert [p.label for p in listing.pictures] == ["cat", "dog", None, "cat"]
    assert [p.test for p in listing.pictures] == [False, False, False, True]
    assert scan(lay(tmp_path / "vehicles", "train/1.png", "car/2.png")).classes == ("car", "train")


def table(root: Path, text: str, *names: str) -> Path:
    lay(root, *(names or ("a.png", "b.png", "sub/c.png", "d.png")))
    (root / "labels.csv").write_text(text)
    return root


@pytest.mark.parametrize(
    "text",
    [
        "file,label\na.png,cat\nb.png,dog\nsub/c.png,\n",
        "\ufefffilename;class;age\r\na.png;cat;3\r\nb.png;dog;4\r\nsub/c.png;;\r\n",
        "Label\tImage\ncat\ta\ndog\tb\n\nunlabeled\tsub/c\n",
        'id,label\n"./a.png", cat \n"b.png",dog\na.png,cat\n',
    ],
)
def test_a_table_of_labels(tmp_path: Path, text: str) -> None:
    listing = scan(table(tmp_path, text))
    assert listing.layout == "csv"
    assert found(listing) == {"a.png": "cat", "b.png": "dog", "sub/c.png": None, "d.png": None}
    assert not listing.absent
    assert not listing.others


def test_a_table_may_name_what_is_not_there(tmp_path: Path) -> None:
    listing = scan(table(tmp_path, "file,label\na.png,cat\nghost.png,dog\n../out.png,cat\n"))
    assert [name.split(" ")[0] for name in listing.absent] == ["ghost.png", "../out.png"]
    assert "line 3" in listing.absent[0]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a.png,cat\nb.png,dog\n", "names no column 'file'"),
        ("file,age\na.png,3\n", "names no column 'label'"),
        ("", "names no column 'file'"),
        ("file,label\na.png\n", "line 2: 1 cells where the header has 2"),
        ("file,label\na.png,cat\na.png,dog\n", "line 3: a.png has the label 'dog', but in line 2 'cat'"),
    ],
)
def test_a_bad_table_is_refused_with_its_line(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(DataError) as caught:
        scan(table(tmp_path, text))
    assert words in str(caught.value)
    assert "labels.csv" in str(caught.value)


def test_a_table_in_another_encoding_is_refused(tmp_path: Path) -> None:
    lay(tmp_path, "a.png")
    (tmp_path / "labels.csv").write_bytes("file,label\na.png,größe\n".encode("latin-1"))
    with pytest.raises(DataError, match="not UTF-8"):
        scan(tmp_path)


def sites(root: Path) -> Path:
    """Three sites: all labelled, some, none."""
    lay(root, *(f"a/{k % 2}/{k}.png" for k in range(6)))
    lay(root, *(f"b/{k % 2}/{10 + k}.png" for k in range(4)), *(f"b/unlabeled/{20 + k}.png" for k in range(5)))
    lay(root, *(f"c/unlabeled/{30 + k}.png" for k in range(3)))
    return root


def test_a_folder_a_site(tmp_path: Path) -> None:
    listing = scan(sites(tmp_path))
    assert (listing.layout, listing.sites, listing.classes) == ("sites", ("a", "b", "c"), ("0", "1"))
    assert Counter(p.site for p in listing.pictures) == {0: 6, 1: 9, 2: 3}


@pytest.mark.parametrize(
    ("names", "layout"),
    [
        (["a/cat/1.png", "a/dog/2.png", "b/cat/3.png", "b/dog/4.png"], "sites"),  # class names recur
        (["a/cat/1.png", "a/dog/2.png", "b/unlabeled/3.png"], "sites"),
        (["cat/p1/1.png", "cat/p2/2.png", "dog/p3/3.png"], "classes"),  # a folder a patient below the class
        (["cat/1.png", "dog/deep/2.png"], "classes"),
        (["a/cat/1.png", "a/dog/2.png", "b/3.png"], "classes"),
    ],
)
def test_sites_are_told_from_classes(tmp_path: Path, names: list[str], layout: str) -> None:
    assert scan(lay(tmp_path, *names)).layout == layout


def test_sites_may_have_tables(tmp_path: Path) -> None:
    table(tmp_path / "a", "file,label\n1.png,cat\n", "1.png", "2.png")
    table(tmp_path / "b", "file,label\n3.png,dog\n", "3.png")
    assert [(p.label, p.site) for p in scan(tmp_path).pictures] == [("cat", 0), (None, 0), ("dog", 1)]


@pytest.mark.parametrize(("make", "words"), [(False, "there is no folder"), (True, "holds no images")])
def test_nothing_there(tmp_path: Path, make: bool, words: str) -> None:
    if make:
        (tmp_path / "x" / "cat").mkdir(parents=True)
    with pytest.raises(DataError, match=words):
        scan(tmp_path / "x")


# --- faults -----------------------------------------------------------------------------------------------------------


def faults(root: Path, classes: str = "") -> list[tuple[str, str]]:
    return [(f.kind, f.text) for f in check_folder(root, DataConfig(classes=classes)).faults]


def test_a_clean_folder_has_none(tmp_path: Path) -> None:
    report = check_folder(lay(tmp_path, *(f"{c}/{c}{k}.png" for c in ("cat", "dog") for k in range(5))), DataConfig())
    assert report.clean
    assert report.usable
    assert report.faults == ()
    assert (report.train_counts, report.test_counts, report.unlabelled) == ((4, 4), (1, 1), 0)
    assert report.memory == 10 * 64


@pytest.mark.parametrize(
    ("label", "meant"),
    [
        ("melanmoa", "melanoma"),
        ("Naevus", "naevus"),
        ("melanoma 2", ""),  # a neighbour, not a typo: digits differ
        ("carcinoma", ""),
    ],
)
def test_typos(tmp_path: Path, label: str, meant: str) -> None:
    rows = ["file,label", *(f"m{k}.png,melanoma" for k in range(60)), *(f"n{k}.png,naevus" for k in range(60))]
    names = [row.partition(",")[0] for row in rows[1:]]
    table(tmp_path, "\n".join([*rows, f"x.png,{label}"]), *names, "x.png")
    said = [fault for fault in typos(scan(tmp_path)) if fault.kind == STOP]
    assert len(said) == bool(meant)
    if meant:
        assert f"{label!r} (1 image, such as x.png) looks like a misspelt {meant!r} (60 images)" in said[0].text
        # Naming the classes is the way to say that it is none.
        assert not list(typos(scan(tmp_path, ("melanoma", "naevus", label, "other"))))


def test_a_label_that_is_not_among_the_classes(tmp_path: Path) -> None:
    lay(tmp_path, "cat/1.png", "dgo/2.png")
    ((kind, text), *_) = faults(tmp_path, "cat,dog")
    assert kind == STOP
    assert "'dgo'" in text
    assert "did you mean 'dog'?" in text


def test_damaged_and_missing_files_are_named(tmp_path: Path) -> None:
    rows = "".join(f"{k}.png,{'cat' if k % 2 else 'dog'}\n" for k in range(8))
    table(tmp_path, f"file,label\n{rows}ghost.png,cat\n", *(f"{k}.png" for k in range(8)))
    (tmp_path / "3.png").write_bytes(b"junk")
    kinds = dict(reversed(f) for f in faults(tmp_path))
    assert [t for t, kind in kinds.items() if kind == MEND and "3.png cannot be read" in t]
    assert [t for t, kind in kinds.items() if kind == MEND and "ghost.png" in t and "line 10" in t]
    with pytest.warns(UserWarning, match=r"1 images that cannot be read are skipped \(3.png"):
        data = load_folder(tmp_path, DataConfig(), 0)
    assert len(data.train_labels) + len(data.test_labels) == 7


def test_duplicates(tmp_path: Path) -> None:
    lay(tmp_path, *(f"{c}/{c}{k}.png" for c in ("cat", "dog") for k in range(4)))
    for name in ("cat/x.png", "cat/y.png", "unlabeled/z.png"):
        save(tmp_path / name, PIXELS * 3)
    for name in ("cat/v.png", "dog/v.png"):
        save(tmp_path / name, PIXELS * 2)
    said = faults(tmp_path)
    assert (MEND, "the same image has different labels: cat/v.png, dog/v.png; keep the right one") in said
    assert (NOTE, "the same image 3 times: cat/x.png, cat/y.png, unlabeled/z.png; one is enough") in said
    save(tmp_path / "test" / "cat" / "t.png", PIXELS * 3)
    assert any(kind == NOTE and "trained and tested on" in text for kind, text in faults(tmp_path))


def test_skew_is_noted(tmp_path: Path) -> None:
    lay(tmp_path, *(f"cat/{k}.png" for k in range(30)), "dog/a.png", "dog/b.png")
    assert [kind for kind, text in faults(tmp_path) if "unbalanced" in text] == [NOTE]


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (["cat/1.png", "cat/2.png"], "all labels are of one class, 'cat'"),
        (["unlabeled/1.png"], "no image has a label"),
        (["cat/1.png", "dog/2.png", "test/cat/3.png", "test/unlabeled/4.png"], "1 images have no label, and testing"),
        (["cat/1.png", "dog/2.png", "test/cow/3.png"], "class 'cow' has images in test/ only"),
    ],
)
def test_what_stops_a_run(tmp_path: Path, names: list[str], words: str) -> None:
    lay(tmp_path, *names)
    listing = scan(tmp_path)
    assert any(words in f.text for f in content_faults(listing, listing.pictures) if f.kind == STOP)
    with pytest.raises(DataError, match=words):
        load_folder(tmp_path, DataConfig(), 0)


def test_a_class_of_damaged_files_only(tmp_path: Path) -> None:
    lay(tmp_path, "cat/1.png", "dog/2.png", "cow/3.png")
    (tmp_path / "cow" / "3.png").write_bytes(b"junk")
    with pytest.raises(DataError, match="class 'cow' has no image that can be read"):
        load_folder(tmp_path, DataConfig(), 0)


def test_too_few_labels_to_test(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="2 labels are too few to keep one for testing"):
        load_folder(lay(tmp_path, "cat/1.png", "dog/2.png"), DataConfig(), 0)
    report = check_folder(tmp_path, DataConfig())
    assert not report.usable
    assert "too few to keep one for testing" in report.faults[0].text


def test_a_link_that_leads_nowhere_is_unreadable(tmp_path: Path) -> None:
    lay(tmp_path, *(f"{c}/{c}{k}.png" for c in ("cat", "dog") for k in range(5)))
    (tmp_path / "cat" / "gone.png").symlink_to(tmp_path / "nowhere.png")
    assert any("gone.png" in text for _, text in faults(tmp_path))


def test_a_link_to_a_folder_is_followed_but_not_in_circles(tmp_path: Path) -> None:
    lay(tmp_path / "set", *(f"{c}/{k}.png" for c in ("cat", "dog") for k in range(3)))
    lay(tmp_path / "elsewhere", "4.png")
    (tmp_path / "set" / "cat" / "more").symlink_to(tmp_path / "elsewhere")
    for name, target in (("itself", "."), ("again", "../cat"), ("dog", "../dog")):
        (tmp_path / "set" / "cat" / name).symlink_to(target)
    (tmp_path / "set" / "dog" / "cat").symlink_to("../cat")
    (tmp_path / "set" / "dog" / "up").symlink_to("..")
    found = [str(path.relative_to(tmp_path / "set")) for path in pictures_below(tmp_path / "set")]
    ways = ("cat", "cat/dog", "dog", "dog/cat")
    pictures = [f"{way}/{k}.png" for way in ways for k in range(3)]
    assert Counter(found) == Counter([*pictures, "cat/more/4.png", "dog/cat/more/4.png"])


# --- the test part ----------------------------------------------------------------------------------------------------


@settings(max_examples=100)
@given(
    st.lists(st.tuples(st.integers(-1, 5), st.integers(0, 2)), min_size=1, max_size=120),
    st.floats(1, 90),
    st.integers(0, 9),
)
def test_the_test_part_is_stratified(rows: list[tuple[int, int]], percent: float, seed: int) -> None:
    labels, owners = (np.array(column, dtype=np.int64) for column in zip(*rows, strict=True))
    chosen = held_out(labels, owners, percent, seed)
    assert np.array_equal(chosen, held_out(labels, owners, percent, seed))
    assert not chosen[labels < 0].any()
    known = int((labels >= 0).sum())
    wanted = max(1, round(known * percent / 100)) if known else 0
    groups = Counter(row for row in rows if row[0] >= 0)
    assert wanted - len(groups) <= chosen.sum() <= wanted
    for (label, owner), size in groups.items():
        taken = int(chosen[(labels == label) & (owners == owner)].sum())
        assert taken < size  # one stays to learn from
        assert taken <= size * wanted / known + 1  # more only in place of groups that have none to give


def test_another_seed_draws_another_test_part() -> None:
    labels = np.arange(100) % 5
    drawn = {tuple(np.flatnonzero(held_out(labels, labels * 0, 20, seed))) for seed in range(5)}
    assert len(drawn) == 5
    assert all(np.bincount(labels[list(one)]).tolist() == [4] * 5 for one in drawn)


def test_a_test_folder_comes_first(tmp_path: Path) -> None:
    lay(tmp_path, *(f"{c}/{c}{k}.png" for c in ("cat", "dog") for k in range(5)), "test/dog/t.png")
    data = load_folder(tmp_path, DataConfig(), 0)
    assert len(data.train_labels) == 10
    assert data.test_labels.tolist() == [1]


# --- who gets what ----------------------------------------------------------------------------------------------------


def test_missing_labels_are_the_unlabelled_part() -> None:
    labels = np.where(np.arange(200) % 4 == 0, np.arange(200) % 5, -1)
    split = partition(labels, "LLMMUU", 1.0, 0.1, 3)
    assert sorted(np.concatenate(split.labelled).tolist()) == np.flatnonzero(labels >= 0).tolist()
    assert sorted(np.concatenate(split.unlabelled).tolist()) == np.flatnonzero(labels < 0).tolist()
    sizes = [len(part) for part in split.unlabelled]
    assert sizes[:2] == [0, 0]
    assert max(sizes) - min(sizes[2:]) <= 2
    assert class_counts(split.unlabelled, labels, 5).sum() == 0


def test_sites_keep_what_is_theirs(tmp_path: Path) -> None:
    data = load_folder(sites(tmp_path), DataConfig(), 0)
    assert data.sites == ("a", "b", "c")
    assert data.roles == "LMU"
    assert data.owners is not None
    split = by_owner(data.train_labels, data.owners, 3)
    for site in range(3):
        both = np.concatenate([split.labelled[site], split.unlabelled[site]])
        assert sorted(both.tolist()) == np.flatnonzero(data.owners == site).tolist()
    assert [len(part) for part in split.unlabelled] == [0, 5, 3]
    assert sum(len(part) for part in split.labelled) == 8  # of ten, two are for testing


def test_a_run_on_sites_has_a_client_each(tmp_path: Path) -> None:
    data = load_folder(sites(tmp_path), DataConfig(), 0)
    with pytest.raises(DataError, match=r"holds 3 sites \(a; b; c\), but graph.clients = 10: add --clients 3"):
        with_sites(Config(), data)
    fits = replace(Config(), graph=GraphConfig("full", 3))
    assert with_sites(fits, data).graph.roles == "LMU"
    assert with_sites(with_sites(fits, data), data) == with_sites(fits, data)
    with pytest.raises(DataError, match=r"graph.roles = 'LLL'.*'LMU'"):
        with_sites(replace(fits, graph=GraphConfig("full", 3, "LLL")), data)


def test_a_site_without_images_is_refused(tmp_path: Path) -> None:
    (sites(tmp_path) / "d" / "unlabeled").mkdir(parents=True)
    with pytest.raises(DataError, match="site 'd' holds no image"):
        load_folder(tmp_path, DataConfig(), 0)


def test_one_site_alone_may_lack_labels(tmp_path: Path) -> None:
    parts = load_site(sites(tmp_path) / "c", ("0", "1"), (1, 6, 7))
    assert parts.images.shape == (3, 1, 6, 7)
    assert parts.labels.tolist() == [-1] * 3
    assert parts.test_images.shape == (0, 1, 6, 7)
    some = load_site(tmp_path / "b", ("1", "0"), (3, 8, 8))
    assert sorted(some.labels.tolist()) == [-1] * 5 + [0, 0, 1]
    assert len(some.test_labels) == 1
    with pytest.raises(DataError, match="is not among data"):
        load_site(tmp_path / "b", ("0", "2"), (1, 8, 8))


def test_a_site_is_not_tested_on_images_without_a_label(tmp_path: Path) -> None:
    """It would find out after the last round."""
    lay(sites(tmp_path), "b/test/unlabeled/40.png", "b/test/0/41.png")
    with pytest.raises(DataError, match="1 images have no label, and testing needs it"):
        load_site(tmp_path / "b", ("0", "1"), (1, 8, 8))


def test_class_names() -> None:
    assert class_names("") == ()
    assert class_names(" a b, c") == ("a b", "c")
    for wrong in ("a,,b", "a,a", ","):
        with pytest.raises(DataError, match=r"data\.classes"):
            class_names(wrong)


@pytest.mark.parametrize("name", ["scans/", "./scans", "~/scans", "a/b"])
def test_what_is_spelt_like_a_path_is_a_folder(name: str) -> None:
    assert sources.is_folder(name)
    with pytest.raises(DataError, match="there is no folder"):
        sources.load(name)


def test_a_name_of_the_catalogue_is_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    few_labels(tmp_path / "digits")
    assert not sources.is_folder("digits")
    assert sources.is_folder("./digits")
    assert not sources.is_folder("a/b.npz")
    assert not sources.is_folder("module:thing")


def test_the_same_folder_gives_the_same_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SEMIDFL_DATA", str(tmp_path / "cache"))
    few_labels(tmp_path / "own")
    one, two, other = (sources.load(str(tmp_path / "own"), None, seed) for seed in (0, 0, 1))
    assert np.array_equal(one.train_images, two.train_images)
    assert np.array_equal(one.train_labels, two.train_labels)
    assert not np.array_equal(one.test_images, other.test_images) or len(one.test_labels) == 0
    assert list((tmp_path / "cache" / "folders").glob("*.npz"))
