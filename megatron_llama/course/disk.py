"""A file system in memory that can crash: what survives at each moment, by what was synced.

POSIX says little about what is on a disk before fsync. Here the content of a file survives a power failure once the
file was synced, and a name in a directory once the directory was synced. Until then either may be there or not, and a
later change of names without an earlier one.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from megatron.checkpoint.directory import MANIFEST

Tree = Mapping[str, tuple[bytes | None, int]]
"""What is on a disk: the content of each file, None for a directory, and the step that wrote it, by path."""


@dataclass
class _Node:
    """A file, or a directory with its entries; and what of it is on stable storage."""

    content: bytes | None = None
    entries: dict[str, "_Node"] = field(default_factory=dict)
    stable_content: bytes = b""
    stable_entries: dict[str, "_Node"] = field(default_factory=dict)
    written: int = 0

    def sync(self) -> None:
        self.stable_content, self.stable_entries = self.content or b"", dict(self.entries)


@dataclass(frozen=True)
class Crash:
    """A way in which a machine stops, and what it forgets."""

    name: str
    loses_contents: bool
    """Whether files lose what was written after their last sync."""
    loses_names: bool
    """Whether directories lose the changes after their last sync."""
    keeps_last_rename: bool = False
    """Whether the last rename survives without a sync: changes of names may reach the disk in another order."""


MOST_STEPS = 1_000
CRASHES = (
    Crash("a kill of the process", loses_contents=False, loses_names=False),
    Crash(
        "a power failure that keeps all names, and the contents that were synced,",
        loses_contents=True,
        loses_names=False,
    ),
    Crash("a power failure that keeps only what was synced", loses_contents=True, loses_names=True),
    Crash("a power failure that keeps what was synced, and the last rename,", True, True, keeps_last_rename=True),
)


class Disk:
    """The file system of an answer. Paths are relative, such as ``iter_0000200/manifest.json``; ``.`` is the root.

    Errors are those of the system: ``FileExistsError``, ``FileNotFoundError``, ``OSError``.
    """

    def __init__(self, tree: Tree | None = None) -> None:
        """A disk after a reboot: what ``tree`` has is on stable storage."""
        self._root = _Node()
        self.steps: list[str] = []
        self._renamed: tuple[_Node, str, _Node, str, _Node] | None = None
        """The last rename: the directory and the name before, those after, and what has the name."""
        self.moments: list[list[Tree]] = []
        """What each of :data:`CRASHES` would leave, before the first step and after each."""
        for path, (content, written) in sorted((tree or {}).items()):
            parent, name = self._parent(path)
            parent.entries[name] = _Node(content, written=written)
        for node in self._below(self._root):
            node.sync()
        self._start = 1 + max((written for _, written in (tree or {}).values()), default=0)
        self._moment()

    def names(self, directory: str = ".") -> list[str]:
        """The names in a directory."""
        return sorted(self._find(directory).entries)

    def make_directory(self, path: str) -> None:
        """Create a directory; ``FileExistsError`` if the name is taken."""
        parent, name = self._parent(path)
        if name in parent.entries:
            raise FileExistsError(f"there is already a {path}")
        parent.entries[name] = _Node()
        self._step(f"make_directory({path})")

    def write(self, path: str, content: bytes) -> None:
        """Create or overwrite a file. A crash during the write leaves half of the content."""
        parent, name = self._parent(path)
        node = parent.entries.setdefault(name, _Node(b""))
        for part in (content[: len(content) // 2], content):
            node.content, node.written = part, self._start + len(self.steps)
            self._step(f"write({path})" if part == content else f"half of write({path})")

    def sync(self, path: str) -> None:
        """Bring the content of a file, or the names in a directory, to stable storage (fsync)."""
        self._find(path).sync()
        self._step(f"sync({path})")

    def rename(self, source: str, target: str) -> None:
        """Give a file or directory another name, in one step; a file at ``target`` is replaced, a directory refused."""
        (parent, name), (new_parent, new_name) = self._parent(source), self._parent(target)
        node = self._find(source)
        if new_parent.entries.get(new_name) is node:
            return
        if new_name in new_parent.entries and node.content is None:
            raise FileExistsError(f"there is already a {target}")
        new_parent.entries[new_name] = node
        del parent.entries[name]
        self._renamed = parent, name, new_parent, new_name, node
        self._step(f"rename({source}, {target})")

    def remove(self, path: str) -> None:
        """Delete a file, or a directory and all in it, file by file; the manifest is the last one."""
        parent, name = self._parent(path)
        node = self._find(path)
        # The order of a system's deletions is not defined, so it is the worst one here.
        for child in sorted(node.entries, key=lambda child: child == MANIFEST):
            self.remove(f"{path}/{child}")
        del parent.entries[name]
        self._step(f"remove({path})")

    def _step(self, name: str) -> None:
        if len(self.steps) == MOST_STEPS:
            raise OSError(f"a save of more than {MOST_STEPS:,} steps does not end")
        self.steps.append(name)
        self._moment()

    def _moment(self) -> None:
        self.moments.append([dict(self._left(self._root, "", crash)) for crash in CRASHES])

    def _left(self, node: _Node, prefix: str, crash: Crash) -> Iterator[tuple[str, tuple[bytes | None, int]]]:
        """The files and directories that ``crash`` leaves below ``node``."""
        entries = dict(node.stable_entries if crash.loses_names else node.entries)
        if crash.keeps_last_rename and self._renamed is not None:
            parent, old_name, new_parent, new_name, renamed = self._renamed
            if node is parent and entries.get(old_name) is renamed:
                del entries[old_name]
            if node is new_parent:
                entries[new_name] = renamed
        for name, child in entries.items():
            if child.content is None:
                yield prefix + name, (None, child.written)
                yield from self._left(child, f"{prefix}{name}/", crash)
            else:
                yield prefix + name, (child.stable_content if crash.loses_contents else child.content, child.written)

    def _parent(self, path: str) -> tuple[_Node, str]:
        directory, _, name = path.rpartition("/")
        return self._find(directory or "."), name

    def _find(self, path: str) -> _Node:
        node = self._root
        for name in path.split("/"):
            if name != ".":
                if name not in node.entries:
                    raise FileNotFoundError(f"there is no {path}")
                node = node.entries[name]
        return node

    def _below(self, node: _Node) -> Iterator[_Node]:
        yield node
        for child in node.entries.values():
            yield from self._below(child)
