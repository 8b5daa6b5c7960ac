"""The manifest of Kubernetes has no field that the API does not know, and treats exit codes as the launcher does."""

import json
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from megatron.config.checks import check_run
from megatron.config.command_line import parse_command_line
from megatron.errors import FINAL, ExitCode
from megatron.operation.launch import parse

MANIFEST = Path(__file__).parents[2] / "examples/kubernetes/pretrain.yaml"
MODELS = {"Job": "V1Job", "Service": "V1Service"}


@cache
def documents() -> dict[str, dict[str, Any]]:
    return {document["kind"]: document for document in yaml.safe_load_all(MANIFEST.read_text(encoding="utf-8"))}


def through_the_models(document: dict[str, Any]) -> Any:
    """The document as the client's models write what they have read: unknown fields are gone."""
    client = pytest.importorskip("kubernetes.client").ApiClient()
    response = SimpleNamespace(data=json.dumps(document))
    try:
        model = client.deserialize(response, MODELS[document["kind"]])
    except (TypeError, AttributeError):
        model = client.deserialize(response.data, MODELS[document["kind"]], "application/json")
    return client.sanitize_for_serialization(model)


@pytest.mark.parametrize("kind", MODELS)
def test_the_models_of_the_client_know_every_field(kind: str) -> None:
    assert through_the_models(documents()[kind]) == documents()[kind]


def test_a_misspelt_field_is_found() -> None:
    job = json.loads(json.dumps(documents()["Job"]))
    job["spec"]["podFailurePolicy"]["rules"][0]["onExitCode"] = job["spec"]["podFailurePolicy"]["rules"][0].pop(
        "onExitCodes"
    )
    assert through_the_models(job) != job


def action(job: dict[str, Any], code: int, conditions: tuple[str, ...] = ()) -> str:
    """What the controller does with a pod whose container has ended with ``code``: the first rule that matches."""
    for rule in job["spec"]["podFailurePolicy"]["rules"]:
        codes = rule.get("onExitCodes")
        if codes is not None and codes["operator"] == "In" and code in codes["values"]:
            return str(rule["action"])
        if any(one["type"] in conditions and one["status"] == "True" for one in rule.get("onPodConditions", ())):
            return str(rule["action"])
    return "Count"


def test_exit_codes_are_respected() -> None:
    """Where the launcher does not restart, neither does the job, but for a run that has stopped and saved."""
    job = documents()["Job"]
    for code in ExitCode:
        if code == ExitCode.STOPPED:
            expected = "Ignore"
        elif code in FINAL:
            expected = "FailJob"
        else:
            expected = "Count"
        if code != ExitCode.COMPLETE:
            assert action(job, code) == expected, code
    assert action(job, 137) == "Count"
    assert action(job, 143, ("DisruptionTarget",)) == "Ignore"
    assert action(job, ExitCode.ACTION_REQUIRED, ("DisruptionTarget",)) == "FailJob"
    containers = {container["name"] for container in job["spec"]["template"]["spec"]["containers"]}
    rules = [rule["onExitCodes"] for rule in job["spec"]["podFailurePolicy"]["rules"] if "onExitCodes" in rule]
    assert {rule["containerName"] for rule in rules} == containers
    assert job["spec"]["template"]["spec"]["restartPolicy"] == "Never"  # the API demands it of such a policy


def test_the_nodes_of_the_job_are_those_of_the_launcher_and_meet_at_the_service() -> None:
    job, service = documents()["Job"]["spec"], documents()["Service"]
    pod = job["template"]["spec"]
    (container,) = pod["containers"]
    assert container["command"] == ["python", "-m", "megatron.operation.launch"]
    options = parse(container["args"])
    assert int(options.nnodes) == job["completions"] == job["parallelism"]
    assert int(options.nproc_per_node) == int(container["resources"]["limits"]["nvidia.com/gpu"])
    assert options.module and options.training_script == "megatron.commands.pretrain_llama"
    name = documents()["Job"]["metadata"]["name"]
    assert options.rdzv_endpoint == f"{name}-0.{service['metadata']['name']}:29500"
    assert pod["subdomain"] == service["metadata"]["name"]
    assert service["spec"]["selector"].items() <= job["template"]["metadata"]["labels"].items()
    assert service["spec"]["clusterIP"] == "None" and service["spec"]["publishNotReadyAddresses"]
    assert pod["terminationGracePeriodSeconds"] > options.shutdown_timeout


def test_the_flags_of_the_job_are_accepted_and_its_directories_are_volumes() -> None:
    (container,) = documents()["Job"]["spec"]["template"]["spec"]["containers"]
    options = parse(container["args"])
    config = parse_command_line(options.training_script_args)
    check_run(config, int(options.nnodes) * int(options.nproc_per_node))
    assert config.operation.preflight and config.checkpoint.save == config.checkpoint.load
    mounted = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    volumes = documents()["Job"]["spec"]["template"]["spec"]["volumes"]
    assert mounted.keys() == {volume["name"] for volume in volumes}
    assert config.checkpoint.save is not None and config.checkpoint.save.startswith(mounted["checkpoints"] + "/")
