"""The arithmetic of the literature reproduces published figures from their stated inputs."""

import pytest

from megatron.commands import estimate


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        # 3.645e25 FLOPs, which are 1,168 years on one H100 at its peak.
        ("compute --parameters 405e9 --tokens 15e12 --gpus 16384 --tflops 400", ["3.645e+25", "64.4", "25,312,500"]),
        ("compute --parameters 405e9 --tokens 15e12 --tflops 989", ["426,567.2"]),
        # 30.84 million GPU-hours (model card) are 328 TFLOP/s per GPU; 54 days of 16,384 GPUs would need 477.
        ("compute --parameters 405e9 --tokens 15e12 --gpus 16384 --tflops 328.31", ["30,839,755"]),
        ("compute --parameters 405e9 --tokens 15e12 --gpus 16384 --tflops 476.85", ["54.0"]),
        ("compute --parameters 8e9 --tokens 1e12 --price-per-gpu-hour 2", ["4.8e+22", "33,333", "66,667"]),
        # 175 billion parameters with gradients in fp32, and without.
        ("memory --parameters 175e9 --gradient-bytes 4", ["18", "3.15 TB = 2.865 TiB"]),
        ("memory --parameters 175e9", ["2.8 TB"]),
        # 7.5 billion parameters on 64 ranks (arXiv 1910.02054, figure 1): 120, 31.4, 16.6 and 1.9 GB.
        ("memory --parameters 7.5e9 --ranks 64", ["0.12 TB"]),
        ("memory --parameters 7.5e9 --ranks 64 --zero 1", ["0.03141 TB"]),
        ("memory --parameters 7.5e9 --ranks 64 --zero 2", ["0.01664 TB"]),
        ("memory --parameters 7.5e9 --ranks 64 --zero 3", ["0.001875 TB"]),
        ("communication --size-gb 16 --ranks 64 --gb-per-s 50", ["0.63"]),
        ("communication --size-gb 1 --ranks 1 --gb-per-s 1", ["seconds                       0\n"]),
        ("compute --parameters 0 --tokens 1", []),
    ],
)
def test_the_tool_prints_the_figures_and_refuses_what_is_not_positive(
    arguments: str, expected: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert estimate.main(arguments.split()) == (0 if expected else 2)
    printed = capsys.readouterr()
    assert printed.err.startswith("" if expected else "ERROR: --parameters 0.0")
    assert all(text in printed.out for text in expected)
