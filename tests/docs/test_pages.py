"""What README, docs and examples name is there: pages, sections, files and flags."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from megatron.config.command_line import flag_names
from megatron.config.megatron_flags import NOT_SUPPORTED
from tools.flag_reference import megatron_flags

REPOSITORY = Path(__file__).parents[2]
PAGES = sorted([REPOSITORY / "README.md", *REPOSITORY.glob("docs/*.md")])
SCRIPTS = sorted(REPOSITORY.glob("examples/**/*.sh"))
TO_COME = {"docs/tensor_parallel.md", "docs/dry_run.md", "examples/slurm"}
"""What is linked to and written at the same time by others."""

every_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
every_text = pytest.mark.parametrize("text", [*PAGES, *SCRIPTS], ids=lambda path: path.name)

TORCHRUN = {"nnodes", "nproc-per-node", "rdzv-id", "rdzv-backend", "rdzv-endpoint", "max-restarts", "shutdown-timeout"}
TORCHRUN |= {"standalone", "node-rank", "master-addr", "master-port", "rdzv-conf", "log-dir", "redirects", "tee"}
SLURM = {"signal", "requeue", "time", "nodes", "ntasks-per-node", "open-mode", "kill-on-bad-exit", "gpus-per-node"}
OTHERS = {"help", "no-build-isolation", "config-settings", "build-option", "cpp_ext", "cuda_ext"}  # apex with pip
FOREIGN = {"--" + name for name in TORCHRUN | SLURM | OTHERS}
"""Flags that are not ours to check."""

FOREIGN_PROGRAMS = {"torchrun", "srun", "sbatch", "pip", "scontrol", "squeue", "wandb", "nvidia-smi", "python", "git"}


def sections(page: Path) -> set[str]:
    """The anchors that GitHub makes of the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@every_page
def test_every_link_leads_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        if link.startswith(("https://", "http://")):
            continue
        path, _, section = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if str(target.relative_to(REPOSITORY)) in TO_COME and not target.exists():
            continue
        assert target.exists(), f"{page.name} links to {link}"
        assert not section or section in sections(target), f"{target.name} has no section {section}"


@every_page
def test_every_file_that_a_page_names_is_there(page: Path) -> None:
    places = re.findall(r"`((?:tools|examples|megatron|docs|tests)/[\w./-]*)`", page.read_text(encoding="utf-8"))
    missing = [path for path in places if path.rstrip("/") not in TO_COME and not (REPOSITORY / path).exists()]
    assert not missing


def test_every_page_is_in_the_index() -> None:
    index = (REPOSITORY / "docs/README.md").read_text(encoding="utf-8")
    linked = set(re.findall(r"\]\((\w+\.md)\)", index))
    assert {page.name for page in PAGES} - {"README.md"} <= linked


@cache
def flags_of_tool(name: str) -> frozenset[str]:
    """The flags of tools/NAME.py: the fields of its dataclasses, and of the groups that it takes over."""
    source = (REPOSITORY / "tools" / f"{name}.py").read_text(encoding="utf-8")
    found = set(re.findall(r'aliases=\["(--[\w-]+)"\]', source))
    for definition in ast.walk(ast.parse(source)):
        if isinstance(definition, ast.ClassDef) and definition.decorator_list:
            fields = [statement for statement in definition.body if isinstance(statement, ast.AnnAssign)]
            names = ["--" + ast.unparse(field.target).replace("_", "-") for field in fields]
            found |= {*names, *("--no-" + name[2:] for name in names)}
    if re.search(r"\b(TokenizerConfig|ModelConfig)\b", source):
        found |= pretrain_flags()
    if "SliceConfig" in source and name != "rank_slice":
        found |= flags_of_tool("rank_slice")
    return frozenset(found)


@cache
def pretrain_flags() -> frozenset[str]:
    return frozenset(flag_names()) | {"--no-" + name[2:] for name in flag_names()}


@cache
def all_flags() -> frozenset[str]:
    tools = [flags_of_tool(path.stem) for path in (REPOSITORY / "tools").glob("*.py")]
    return pretrain_flags().union(*tools)


def flags_in(text: str) -> set[str]:
    return set(re.findall(r"(?<![\w-])--[a-z][\w-]*\w", text))


@every_text
def test_every_flag_that_is_named_exists(text: Path) -> None:
    content = text.read_text(encoding="utf-8")
    known = all_flags() | FOREIGN
    if text.name == "coming_from_megatron.md":
        known |= NOT_SUPPORTED.keys() | {flag.flag for flag in megatron_flags()}
    assert not flags_in(content) - known


def commands(content: str) -> list[tuple[str, set[str]]]:
    """Programs and the flags that follow them, in the commands of a text; programs of ours by their path."""
    found: list[tuple[str, set[str]]] = []
    for line in content.replace("\\\n", " ").splitlines():
        program = ""
        for word in re.split(r"[\s\"'()]+", line.partition(" #")[0]):
            if word.endswith(".py") or word in FOREIGN_PROGRAMS or word in ("|", "&&", ";"):
                program = word
            elif program.endswith(".py"):
                found.append((program, flags_in(word)))
    return [(program, flags) for program, flags in found if flags]


@every_text
def test_every_flag_of_a_command_is_one_of_its_program(text: Path) -> None:
    content = text.read_text(encoding="utf-8")
    if text.suffix == ".md":
        content = "\n".join(re.findall(r"^```bash\n(.*?)^```", content, re.MULTILINE | re.DOTALL))
    for program, flags in commands(content):
        name = Path(program).stem
        known = pretrain_flags() if name == "pretrain_llama" else flags_of_tool(name)
        assert not flags - known - {"--help"}, program


def test_commands_are_read_to_their_end() -> None:
    text = "torchrun --nnodes 2 a.py \\\n  --x 1 \\\n  --y=2 | tools/b.py --z # --comment\nX=(--array)"
    assert commands(text) == [("a.py", {"--x"}), ("a.py", {"--y"}), ("tools/b.py", {"--z"})]
