"""Which layers of a chunk are recomputed, in which units, and whose activations go to the host."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.config.activations import ActivationConfig, LayerUnit, RecomputeMethod
from megatron.config.command_line import parse_command_line


def full(method: RecomputeMethod, layers: int, host: int = 0) -> ActivationConfig:
    return ActivationConfig(
        recompute_granularity="full",
        recompute_method=method,
        recompute_num_layers=layers,
        cpu_offloading_num_layers=host,
    )


def spelled(units: tuple[LayerUnit, ...]) -> str:
    """Layers in brackets where they are recomputed, H behind what is on the host: ``[0,1]H 2``."""
    words = []
    for unit in units:
        layers = ",".join(map(str, unit.layers))
        words.append((f"[{layers}]" if unit.is_recomputed else layers) + ("H" if unit.is_offloaded else ""))
    return " ".join(words)


@pytest.mark.parametrize(
    ("activations", "num_layers", "expected"),
    [
        (ActivationConfig(), 3, "0 1 2"),
        (ActivationConfig(), 0, ""),
        (ActivationConfig(recompute_activations=True), 2, "0 1"),
        (ActivationConfig(cpu_offloading_num_layers=2), 3, "0H 1H 2"),
        (full("uniform", 1), 3, "[0] [1] [2]"),
        (full("uniform", 2), 4, "[0,1] [2,3]"),
        (full("uniform", 3), 5, "[0,1,2] [3,4]"),
        (full("uniform", 4), 2, "[0,1]"),
        (full("uniform", 2), 0, ""),
        (full("uniform", 2, host=1), 4, "[0,1]H [2,3]"),
        (full("uniform", 2, host=3), 4, "[0,1]H [2,3]H"),
        (full("block", 1), 3, "[0] 1 2"),
        (full("block", 3), 3, "[0] [1] [2]"),
        (full("block", 3), 2, "[0] [1]"),
        (full("block", 1, host=2), 3, "[0]H 1H 2"),
    ],
)
def test_units_of_a_chunk(activations: ActivationConfig, num_layers: int, expected: str) -> None:
    assert spelled(activations.units(num_layers)) == expected


@given(
    method=st.sampled_from(["uniform", "block"]),
    size=st.integers(1, 9),
    host=st.integers(0, 9),
    num_layers=st.integers(0, 20),
)
def test_every_layer_is_in_one_unit(method: RecomputeMethod, size: int, host: int, num_layers: int) -> None:
    units = full(method, size, host).units(num_layers)
    assert [layer for unit in units for layer in unit.layers] == list(range(num_layers))
    recomputed = sum(len(unit.layers) for unit in units if unit.is_recomputed)
    assert recomputed == (num_layers if method == "uniform" else min(size, num_layers))
    assert sum(unit.is_offloaded for unit in units) == len([unit for unit in units if unit.layers.start < host])


def test_selective_means_core_attention_unless_told_otherwise() -> None:
    def modules(arguments: str) -> frozenset[str]:
        return parse_command_line(arguments.split()).activations.modules

    assert modules("") == frozenset()
    assert modules("--recompute-activations") == {"core_attn"}
    assert modules("--recompute-granularity selective") == {"core_attn"}
    assert modules("--recompute-activations --recompute-modules layernorm mlp") == {"layernorm", "mlp"}
    assert modules("--recompute-granularity full --recompute-method block --recompute-num-layers 1") == frozenset()
