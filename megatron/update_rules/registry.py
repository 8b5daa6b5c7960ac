"""The update rules, which are the modules of this package."""

from importlib import import_module
from pkgutil import iter_modules
from typing import Any

import megatron.update_rules
from megatron.update_rules.rule import Flags, UpdateRule


def update_rules() -> dict[str, type[UpdateRule]]:
    """Every rule by name, in the order of their files; rules that are defined elsewhere follow."""
    for module in iter_modules(megatron.update_rules.__path__, f"{megatron.update_rules.__name__}."):
        import_module(module.name)
    return {rule.name: rule for rule in UpdateRule.__subclasses__()}


def rule_flags() -> list[type[Flags]]:
    return [rule.flags for rule in update_rules().values() if rule.flags is not Flags]


def build_rule(config: Any) -> UpdateRule:
    """The rule of ``--optimizer``, with its flags in ``config``."""
    return update_rules()[config.optimizer].of(config)
