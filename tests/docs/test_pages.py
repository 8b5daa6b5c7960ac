"""What README, docs and examples name is there: files, flags, tests and links. The site of the documentation is built
strictly, with nothing from the network, and has what the pages have."""

import ast
import re
import shutil
from collections import Counter
from collections.abc import Iterable
from functools import cache
from pathlib import Path

import pytest
from markdown_it import MarkdownIt
from mkdocs.commands.build import build
from mkdocs.config import load_config
from mkdocs.exceptions import Abort

from docs.flag_pages import megatron_flags
from megatron.architectures.catalog import PRESETS
from megatron.command_line.parser import Parser
from megatron.commands import convert_checkpoint, estimate
from megatron.config.checks import check_run
from megatron.config.command_line import parse_command_line
from megatron.config.megatron_lm import NO_EFFECT, REFUSED
from megatron.config.model import preset
from megatron.config.run_parser import RUN_PARSER
from megatron.errors import ConfigError
from megatron.schedules.catalog import SCHEDULES
from tests.tool_entries import command_lines

REPOSITORY = Path(__file__).parents[2]
PAGES = sorted([REPOSITORY / "README.md", *REPOSITORY.glob("docs/**/*.md")])
SCRIPTS = sorted(path for suffix in ("sh", "sbatch") for path in REPOSITORY.glob(f"examples/**/*.{suffix}"))
PROGRAMS = {path.stem: path for place in ("tools", "benchmarks") for path in REPOSITORY.glob(f"{place}/*.py")}

NAMES = {page: str(page.relative_to(REPOSITORY)).removeprefix("docs/") for page in PAGES}
every_page = pytest.mark.parametrize("page", PAGES, ids=NAMES.get)
every_text = pytest.mark.parametrize("text", [*PAGES, *SCRIPTS], ids=lambda path: NAMES.get(path, path.name))

_TORCHRUN = """--nnodes --nproc-per-node --node-rank --standalone --rdzv-id --rdzv-backend --rdzv-endpoint --rdzv-conf
    --master-addr --master-port --max-restarts --shutdown-timeout --signals-to-handle --numa-binding --log-dir --tee
    --warm-processes"""
_SLURM = """--nodes --ntasks-per-node --gpus-per-node --gpus-per-task --cpus-per-task --exclusive --exclude --partition
    --account --time --job-name --output --error --array --mem --signal --requeue --open-mode
    --kill-on-bad-exit --no-kill --export"""
_OTHERS = """--help --unit --slow --whole-matrix --count --capture-range --pid --no-build-isolation
    --config-settings --build-option --cpp_ext --cuda_ext --system-site-packages --build-arg --patch --type"""
FOREIGN = frozenset(f"{_TORCHRUN} {_SLURM} {_OTHERS}".split())
"""Flags that are not ours to check."""

NAMED_AS_REFUSED = {"tensor_parallel.md": {"--tp-comm-overlap-cfg"}}
"""Flags that a page names in order to say that they are not there."""

FOREIGN_PROGRAMS = {"torchrun", "srun", "sbatch", "scontrol", "squeue", "pip", "python", "wandb", "nvidia-smi", "git"}
FOREIGN_PROGRAMS |= {"docker", "kubectl"}


@every_page
def test_every_file_that_a_page_names_is_there(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    places = re.findall(r"`((?:tools|benchmarks|examples|megatron|docs|tests)/[\w./-]*)`", text)
    assert not [path for path in places if not (REPOSITORY / path).exists()]


def test_every_page_and_every_tool_is_in_the_index() -> None:
    indices = [page for page in PAGES if page.name == "README.md"]
    texts = {page.parent: page.read_text(encoding="utf-8") for page in indices}
    links = [(place, link) for place, text in texts.items() for link in re.findall(r"\]\(([\w/]+\.md)\)", text)]
    linked = {place / link for place, link in links}
    index = texts[REPOSITORY / "docs"]
    assert {*PAGES} - {REPOSITORY / "README.md"} <= linked
    assert not [path.name for path in REPOSITORY.glob("tools/*.py") if f"`{path.name}`" not in index]


COMMANDS: dict[str, Iterable[str]] = {"convert_checkpoint": convert_checkpoint.COMMANDS, "estimate": estimate.COMMANDS}
PRETRAIN = frozenset(RUN_PARSER.spellings)


@cache
def flags_of_script(path: Path) -> frozenset[str]:
    """The flags of a tool or benchmark; some also take those of training."""
    kinds = command_lines(path, [*COMMANDS.get(path.stem, ())])
    found = {flag for kind in kinds for flag in Parser(kind, path.name).spellings}
    return frozenset(found) | (PRETRAIN if path.stem in ("overfit_check", "evaluate", "check_layouts") else set())


@cache
def all_flags() -> frozenset[str]:
    return PRETRAIN.union(*map(flags_of_script, PROGRAMS.values()))


def flags_in(text: str) -> set[str]:
    return set(re.findall(r"(?<![\w-])--[a-z][\w-]*\w", text))


def code_of(text: Path) -> str:
    """The commands of a page or script, without what is for SLURM."""
    content = text.read_text(encoding="utf-8")
    if text.suffix == ".md":
        content = "\n".join(re.findall(r"^```bash\n(.*?)^```", content, re.MULTILINE | re.DOTALL))
    return re.sub(r"^#SBATCH.*$", "", content, flags=re.MULTILINE)


def commands(code: str) -> list[tuple[str, set[str]]]:
    """Programs and the flags that follow them; programs of ours by their path."""
    found: list[tuple[str, set[str]]] = []
    for line in code.replace("\\\n", " ").splitlines():
        program = ""
        for word in re.split(r"[\s\"'()]+", line.partition(" #")[0]):
            if word.endswith(".py") or word in FOREIGN_PROGRAMS or word in ("|", "&&", ";"):
                program = word
            elif program:
                found.append((program, flags_in(word)))
    return [(program, flags) for program, flags in found if flags]


@every_text
def test_every_flag_that_is_named_exists(text: Path) -> None:
    content = text.read_text(encoding="utf-8") if text.suffix == ".md" else code_of(text)
    known = all_flags() | FOREIGN | NAMED_AS_REFUSED.get(text.name, set())
    known = known.union(*(flags for program, flags in commands(code_of(text)) if program in FOREIGN_PROGRAMS))
    if text.name == "coming_from_megatron.md":
        known |= {flag.flag for flag in megatron_flags()} | {*NO_EFFECT} | flags_in(" ".join(REFUSED.values()))
    unknown = flags_in(content) - known
    assert not unknown


@every_text
def test_every_flag_of_a_command_is_one_of_its_program(text: Path) -> None:
    for program, flags in commands(code_of(text)):
        name = Path(program).stem
        if program.endswith(".py"):
            known = PRETRAIN if name == "pretrain_llama" else flags_of_script(PROGRAMS[name])
            unknown = flags - known - {"--help"}
            assert not unknown, program


def test_commands_are_read_to_their_end() -> None:
    code = "torchrun --nnodes 2 a.py \\\n  --one 1 \\\n  --two=2 | tools/b.py --three # --comment\nX=(--array)"
    ours, theirs = [("a.py", {"--one"}), ("a.py", {"--two"}), ("tools/b.py", {"--three"})], ("torchrun", {"--nnodes"})
    assert commands(code) == [theirs, *ours]


BEGIN_WITH_WORDS = {"README.md", "architecture.md", "flags.md", "flags_by_purpose.md", "glossary.md", "python.md"}
BEGIN_WITH_WORDS |= {"failures.md", "sample_order.md", "wrong_numbers.md"}
BEGIN_WITH_WORDS |= {page.name for page in PAGES if page.name.startswith("decisions_")}


@every_page
def test_a_page_begins_with_a_command(page: Path) -> None:
    lines = page.read_text(encoding="utf-8").splitlines()
    assert "```bash" in lines[:27] or page.name in BEGIN_WITH_WORDS


@cache
def messages() -> str:
    """All strings of the code, with an ellipsis for what is filled in."""
    found: list[str] = []
    for path in [REPOSITORY / "pretrain_llama.py", *REPOSITORY.glob("megatron/**/*.py")]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                parts = [part.value if isinstance(part, ast.Constant) else "…" for part in node.values]
                found.append("".join(map(str, parts)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return "\n".join(found)


def test_every_message_that_is_explained_can_be_said() -> None:
    page = (REPOSITORY / "docs/troubleshooting.md").read_text(encoding="utf-8")
    quoted = [part for row in re.findall(r"^\| (`.*?) \|", page, re.MULTILINE) for part in re.findall(r"`(.*?)`", row)]
    quoted += re.findall(r"^`(Iteration .*?)`", page, re.MULTILINE)
    assert len(quoted) > 25
    for message in quoted:
        parts = [part.strip(" ?:().") for part in message.split("…")]
        assert any(parts) and all(part in messages() for part in parts), message


def test_the_picture_of_the_strategies_has_a_letter_for_half_a_byte() -> None:
    page = (REPOSITORY / "docs/data_parallel.md").read_text(encoding="utf-8")
    rows = re.findall(r"^(no_shard|optim\w*) +([wgmo ]+?) +([\d.]+)$", page, re.MULTILINE)
    assert [(name, len(letters.replace(" ", "")) / 2) for name, letters, _ in rows] == [
        (name, float(number)) for name, _, number in rows
    ]
    assert [float(number) for *_, number in rows] == [18, 6 + 12 / 8, 2 + 16 / 8, 16 / 8]


def test_fsdp_with_a_v_schedule_and_tied_embeddings_is_refused_with_the_alternatives_of_the_page() -> None:
    page = (REPOSITORY / "docs/data_parallel.md").read_text(encoding="utf-8")
    section = page.partition("## FSDP, a V schedule and tied embeddings")[2].partition("\n## ")[0]
    refused, _, works = section.partition("What works:")
    fsdp, tied = "optim_grads_params", "--no-untie-embeddings-and-output-weights"

    def check(strategy: str, schedule: str, embeddings: str = tied) -> None:
        run = "--model tiny --mock-data --vocab-size 99 --seq-length 64 --micro-batch-size 2 --train-iters 1 --lr 1e-3"
        chunks = "--num-virtual-stages-per-pipeline-rank 2" if schedule == "interleaved" else ""
        layout = f"--data-parallel-sharding-strategy {strategy} --pipeline-model-parallel-size 2 {chunks}"
        check_run(parse_command_line(f"{run} {layout} --pipeline-schedule {schedule} {embeddings}".split()), 4)

    in_v = {name for name, spec in SCHEDULES.items() if spec.placement == "v"}
    named = {text: set(re.findall(rf"`(?:[^`]* )?({'|'.join(SCHEDULES)})`", text)) for text in (refused, works)}
    assert named == {refused: in_v, works: {"1f1b", "interleaved", "zb-h1"}} and tied in refused and fsdp in refused
    strategies = re.findall(r"`(?:[^`]* )?(optim(?:_grads)?)`", works)
    assert strategies == ["optim", "optim_grads"]
    for schedule in in_v:
        with pytest.raises(ConfigError, match=r"tied embedding .*docs/data_parallel\.md.*use another schedule"):
            check(fsdp, schedule)
        for strategy in strategies:
            check(strategy, schedule)
        check(fsdp, schedule, "--untie-embeddings-and-output-weights")
    for schedule in named[works]:
        check(fsdp, schedule)
    # "Llama 3.2 1B and 3B" are llama3.2-1b and llama3.2-3b.
    (sentence,) = re.findall(r"Of the presets only (.*?) tie their\s+embeddings", works, re.DOTALL)
    families = re.findall(r"([A-Z]\w+(?: [\d.]+(?!\d*B))?) ((?:[\d.]+B\W*(?:and\s)?)+)", sentence)
    tying = {
        f"{name.lower().replace(' ', '')}-{size.lower()}"
        for name, sizes in families
        for size in re.findall(r"[\d.]+B", sizes)
    }
    assert tying == {name for name in PRESETS if not preset(name).untie_embeddings_and_output_weights}


# --- the table of fault cases --------------------------------------------------------------------------------------

FAULTS = (REPOSITORY / "docs" / "fault_cases.md").read_text(encoding="utf-8").partition("## Fault cases")[2]
CASES = [*(f"P{n}" for n in range(1, 14)), *(f"C{n}" for n in range(1, 18)), *(f"D{n}" for n in range(1, 5))]
CASES += [*(f"N{n}" for n in range(1, 4)), *(f"I{n}" for n in range(1, 4))]
ROWS = {
    line.split("|")[1].strip(): line.split("|") for line in FAULTS.splitlines() if re.match(r"\| [A-Z]\d+ \|", line)
}


@cache
def functions(path: str) -> set[str]:
    tree = ast.parse((REPOSITORY / path).read_text(encoding="utf-8"))
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


def test_every_case_has_a_row() -> None:
    assert list(ROWS) == CASES


@pytest.mark.parametrize("case", CASES)
def test_the_tests_of_a_row_exist(case: str) -> None:
    """``tests/x.py::name``, or ``::name`` in the file before it."""
    _, _, _, _, claim, shown, _ = ROWS[case]
    path = ""
    for word in re.findall(r"`((?:tests/|::|megatron/)[^`]*)`", shown):
        file, _, name = word.partition("::")
        path = file or path
        assert (REPOSITORY / path).is_file(), path
        assert not name or name in functions(path), word
    assert shown.strip() or "ot measured" in claim, "a claim without a test"


# --- the site ------------------------------------------------------------------------------------------------

TAGS = ("h1", "h2", "h3", "p", "ul", "ol", "li", "table", "tr", "pre", "code", "strong", "em", "blockquote", "img")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built site. A broken link, a wrong anchor or a page that is missing in ``nav`` ends the build."""
    directory = tmp_path_factory.mktemp("site")
    build(load_config(str(REPOSITORY / "mkdocs.yml"), site_dir=str(directory), strict=True))
    return directory


def page_of(site: Path, source: Path) -> str:
    """The HTML of a page."""
    on_site = {"README.md": ".", "docs/README.md": "pages", "docs/course/README.md": "course"}
    name = str(source.relative_to(REPOSITORY))
    return (site / on_site.get(name, NAMES[source].removesuffix(".md")) / "index.html").read_text(encoding="utf-8")


def elements(html: str) -> Counter[str]:
    """How many elements of each kind a text has."""
    return Counter(tag for tag in re.findall(r"<([a-z]+\d?)\b", html) if tag in TAGS)


@pytest.mark.parametrize("source", PAGES, ids=NAMES.get)
def test_a_page_has_the_lists_and_tables_that_github_shows(site: Path, source: Path) -> None:
    """Python's Markdown reads some lists and tables in another way; markdown-it follows CommonMark."""
    (shown,) = re.findall(r'<article class="md-content__inner.*?>(.*?)</article>', page_of(site, source), re.DOTALL)
    expected = elements(MarkdownIt("commonmark").enable("table").render(source.read_text(encoding="utf-8")))
    assert elements(shown) == expected


def test_the_site_loads_nothing_from_the_network(site: Path) -> None:
    pages = list(site.rglob("*.html"))
    assert len(pages) > len(PAGES)
    for page in pages:
        text = page.read_text(encoding="utf-8")
        loaded = re.findall(r"<(?:link|script|img|iframe)\b[^>]*?(?:href|src)=[\"']?([^\"' >]+)", text)
        assert loaded and not [place for place in loaded if re.match(r"(\w+:)?//", place)], page
        assert "@import" not in text


def test_files_outside_docs_are_linked_by_their_pages(site: Path) -> None:
    home = page_of(site, REPOSITORY / "README.md")
    for page in ("contributing/", "changelog/", "LICENSE.txt", "llama4/", "pages/"):
        assert f'href="{page}"' in home
    assert 'href="../#two-commands"' in page_of(site, REPOSITORY / "docs/tutorial.md")
    assert (site / "LICENSE.txt").read_text() == (REPOSITORY / "LICENSE").read_text()
    for source in PAGES:
        assert "../README.md" not in page_of(site, source)


def test_broken_links_and_pages_that_nothing_leads_to_end_the_build(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shutil.copytree(REPOSITORY / "docs", tmp_path / "docs")
    broken = ("no_such_page.md", "data.md#no-such-section", "../README.md#no-such-section", "../no_such_file.py")
    (tmp_path / "docs/slurm.md").write_text(" ".join(f"[one]({link})" for link in broken))
    (tmp_path / "docs/not_in_nav.md").write_text("# Alone\n")
    config = load_config(
        str(REPOSITORY / "mkdocs.yml"), docs_dir=str(tmp_path / "docs"), site_dir=str(tmp_path / "site"), strict=True
    )
    with pytest.raises(Abort):
        build(config)
    warnings = [one.getMessage() for one in caplog.records if one.name.startswith("mkdocs")]
    for name in ("no_such_page.md", "data.md#no-such-section", "index.md#no-such-section", "no_such_file.py"):
        assert any("slurm.md" in warning and name in warning for warning in warnings), warnings
    assert any("not_in_nav.md" in warning for warning in warnings)
