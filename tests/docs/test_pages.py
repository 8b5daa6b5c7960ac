"""What README, docs and examples name is there: files, flags and tests. The build of test_site.py reads the links."""

import ast
import re
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import get_type_hints

import pytest

from megatron.commands.flag_reference import accepted_flags, megatron_flags
from megatron.config.help import Flag, flags_of
from megatron.config.inference import EvaluateConfig, GenerationConfig, LoadedModelConfig
from megatron.config.megatron_lm import FAMILIES, NO_EFFECT
from megatron.config.run import RunConfig

REPOSITORY = Path(__file__).parents[2]
PAGES = sorted([REPOSITORY / "README.md", *REPOSITORY.glob("docs/*.md")])
SCRIPTS = sorted(path for suffix in ("sh", "sbatch") for path in REPOSITORY.glob(f"examples/**/*.{suffix}"))
PROGRAMS = {
    path.stem: path for place in ("megatron/commands", "benchmarks") for path in REPOSITORY.glob(f"{place}/*.py")
}

every_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
every_text = pytest.mark.parametrize("text", [*PAGES, *SCRIPTS], ids=lambda path: path.name)

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


def test_every_page_is_in_the_index() -> None:
    index = (REPOSITORY / "docs/README.md").read_text(encoding="utf-8")
    linked = set(re.findall(r"\]\((\w+\.md)\)", index))
    assert {page.name for page in PAGES} - {"README.md"} <= linked


def spellings(flags: Iterable[Flag]) -> set[str]:
    """How flags may be written: those that are on or off with ``no-``, too."""
    return {form for flag in flags for form in [flag.name, *negative_forms(flag.name, flag.values == "on, off")]}


def negative_forms(flag: str, is_switch: bool) -> list[str]:
    return ["--no-" + flag[2:]] if is_switch else []


@cache
def pretrain_flags() -> frozenset[str]:
    return frozenset(spellings(accepted_flags().values()))


SHARED = {"SessionConfig": "benchmarks/gpu_lines/session.py", "SliceConfig": "benchmarks/lib/rank_slice.py"}
"""The file of a class whose fields are flags of several benchmarks."""
TAKEN_OVER = {group.__name__: group for group in (GenerationConfig, LoadedModelConfig)}


@cache
def flags_of_script(path: Path) -> frozenset[str]:
    """The flags of a tool or benchmark: the fields of its dataclasses, and of the groups that these take over."""
    source = path.read_text(encoding="utf-8")
    found = set(re.findall(r'aliases=\["(--[\w-]+)"\]', source))
    for definition in ast.walk(ast.parse(source)):
        if isinstance(definition, ast.ClassDef) and definition.decorator_list:
            fields = [statement for statement in definition.body if isinstance(statement, ast.AnnAssign)]
            found |= {flag for one in fields for flag in flags_of_field(one)}
            for base in map(ast.unparse, definition.bases):
                found |= spellings(flags_of(TAKEN_OVER[base])) if base in TAKEN_OVER else set()
                found |= flags_of_script(REPOSITORY / SHARED[base]) if base in SHARED else set()
    if path == PROGRAMS["overfit_check"]:
        found |= pretrain_flags()
    if path == PROGRAMS["evaluate"]:
        found |= pretrain_flags() | spellings(flags_of(EvaluateConfig))
    return frozenset(found)


def flags_of_field(field: ast.AnnAssign) -> set[str]:
    name, annotation = ast.unparse(field.target), ast.unparse(field.annotation)
    groups = {group.__name__: group for group in get_type_hints(RunConfig).values()}
    group = annotation.rpartition("[")[2].rstrip("]")
    if group in groups:
        return spellings(flags_of(groups[group]))
    if group in SHARED:
        return set(flags_of_script(REPOSITORY / SHARED[group]))
    flag = "--" + name.replace("_", "-")
    return {flag, *negative_forms(flag, annotation == "bool")}


@cache
def all_flags() -> frozenset[str]:
    return pretrain_flags().union(*map(flags_of_script, PROGRAMS.values()))


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
        known |= {flag.flag for flag in megatron_flags()} | {*NO_EFFECT} | flags_in(" ".join(FAMILIES.values()))
    unknown = flags_in(content) - known
    assert not unknown


@every_text
def test_every_flag_of_a_command_is_one_of_its_program(text: Path) -> None:
    for program, flags in commands(code_of(text)):
        name = Path(program).stem
        if program.endswith(".py"):
            known = pretrain_flags() if name == "pretrain_llama" else flags_of_script(PROGRAMS[name])
            unknown = flags - known - {"--help"}
            assert not unknown, program


def test_commands_are_read_to_their_end() -> None:
    code = "torchrun --nnodes 2 a.py \\\n  --one 1 \\\n  --two=2 | tools/b.py --three # --comment\nX=(--array)"
    ours, theirs = [("a.py", {"--one"}), ("a.py", {"--two"}), ("tools/b.py", {"--three"})], ("torchrun", {"--nnodes"})
    assert commands(code) == [theirs, *ours]


BEGIN_WITH_WORDS = {"README.md", "architecture.md", "flags.md", "flags_by_purpose.md", "python.md", "sample_order.md"}


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


# --- the table of fault cases --------------------------------------------------------------------------------------

FAULTS = (REPOSITORY / "docs" / "operations.md").read_text(encoding="utf-8").partition("## Fault cases")[2]
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
