"""Mistakes in the answer to exercise 8: a text of it, what stands there instead, and words of the sentence about it."""

LEFTOVERS = 'if name.startswith("."):'
DRAFT = 'draft = hidden_name(iteration, "saving")'
SYNC_FILE = '        disk.sync(f"{draft}/{name}")\n'
MANIFEST = '    disk.write(f"{draft}/{MANIFEST}", manifest)\n    disk.sync(f"{draft}/{MANIFEST}")\n'
SYNC_DRAFT = "    disk.sync(draft)\n"
SYNC = '    disk.sync(".")\n'
COMMENT, OF_TRACKER = "    # The commit.\n", "    # The tracker, in the same way.\n"
OF_REMOVAL = "    # The earlier checkpoints, under names at which no reader looks.\n"
COMMIT = '    disk.rename(draft, final_name(iteration))\n    disk.sync(".")\n'
TRACKER = """    disk.write(f".{TRACKER}", str(iteration).encode())
    disk.sync(f".{TRACKER}")
    disk.rename(f".{TRACKER}", TRACKER)
    disk.sync(".")
"""
REMOVAL = """    for name in disk.names():
        if name.startswith("iter_") and name != final_name(iteration):
            removed = f".{name}.removing-00000000"
            disk.rename(name, removed)
            disk.remove(removed)
"""

MISTAKES = (
    (DRAFT, "draft = final_name(iteration)", "write to a hidden name"),
    (SYNC_FILE, "", "files have their names and no bytes"),
    ('    disk.sync(f"{draft}/{MANIFEST}")\n', "", "the manifest has its name and no bytes"),
    (SYNC_DRAFT, "", "sync the draft before the rename"),
    (
        MANIFEST + SYNC_DRAFT + COMMENT + COMMIT,
        SYNC_DRAFT + COMMIT + MANIFEST.replace("{draft}", "{final_name(iteration)}"),
        "it is written before the rename, which is the commit",
    ),
    (COMMIT + OF_TRACKER + TRACKER, TRACKER + COMMIT, "commit the checkpoint first"),
    (COMMIT, COMMIT.removesuffix(SYNC), "latest_checkpointed_iteration.txt) may reach the disk before"),
    (OF_TRACKER + TRACKER + OF_REMOVAL + REMOVAL, REMOVAL + TRACKER, "move it on before the earlier checkpoint is"),
    (TRACKER, TRACKER.replace('    disk.sync(f".{TRACKER}")\n', ""), "an empty tracker"),
    (
        TRACKER,
        '    disk.write(TRACKER, str(iteration).encode())\n    disk.sync(TRACKER)\n    disk.sync(".")\n',
        "is neither",
    ),
    (TRACKER, TRACKER.removesuffix(SYNC), ".removing-00000000) may reach the disk before"),
    (
        TRACKER + OF_REMOVAL + REMOVAL,
        TRACKER.removesuffix(SYNC) + REMOVAL.replace("            removed", f"        {SYNC}            removed"),
        "save has returned, and",
    ),
    (TRACKER, "", "the tracker is not 200"),
    (COMMIT, "", "rename the draft to the name"),
    (DRAFT, f"{REMOVAL.lstrip()}    {DRAFT}", "only when the new one has its final name"),
    (
        "            disk.rename(name, removed)\n            disk.remove(removed)\n",
        "            disk.remove(name)\n",
        "half of a deletion",
    ),
    (REMOVAL, "", "fills any disk"),
    (" and name != final_name(iteration)", "", "delete the earlier ones alone"),
    (LEFTOVERS, "if False:", "remove what a crash has left"),
    (LEFTOVERS, 'if name.endswith(".saving-00000000"):', "every crash would leave another terabyte"),
)
