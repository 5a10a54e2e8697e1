"""The Kubernetes examples for several machines: Ray Serve, and ranks of torchrun."""

import os
import re
import shutil
import subprocess
import sys
import tomllib

import pytest
import yaml
from support.checkout import environment
from support.server import ROOT
from support.waiting import PATIENCE

from tritonllm import SamplingParams
from tritonllm.demo import model_path
from tritonllm.serve.ray.options import read_plan

RAY_IMAGE = (ROOT / "docker" / "ray.Dockerfile").read_text()
(SERVICE,) = yaml.safe_load_all((ROOT / "deploy" / "kubernetes-ray.yaml").read_text())
CONFIG = yaml.safe_load(SERVICE["spec"]["serveConfigV2"])
CLUSTER = SERVICE["spec"]["rayClusterConfig"]
(WORKERS,) = CLUSTER["workerGroupSpecs"]
JOB_PARTS = {part["kind"]: part for part in yaml.safe_load_all((ROOT / "deploy/kubernetes-torchrun.yaml").read_text())}
JOB = JOB_PARTS["Job"]["spec"]
POD = JOB["template"]["spec"]
(RANKS,) = POD["containers"]


def containers():
    return [group["template"]["spec"]["containers"][0] for group in (CLUSTER["headGroupSpec"], WORKERS)]


def test_serve_understands_its_part():
    schema = pytest.importorskip("ray.serve.schema")
    from tritonllm.serve.ray.ray_serve import ENGINES, INGRESS, build_app

    (application,) = schema.ServeDeploySchema.model_validate(CONFIG).applications
    module, _, name = application.import_path.partition(":")
    assert getattr(sys.modules[module], name) is build_app
    assert {one.name for one in application.deployments} <= {ENGINES, INGRESS}
    build_app(application.args)


def test_an_engine_and_an_ingress_fit_on_a_worker():
    plan = read_plan(CONFIG["applications"][0]["args"])
    has = containers()[1]["resources"]["limits"]
    assert plan.gpus == has["nvidia.com/gpu"]
    assert plan.cpus + plan.serve.ingress_num_cpus <= int(has["cpu"])
    scaling = CONFIG["applications"][0]["deployments"][0]["autoscaling_config"]
    assert (WORKERS["minReplicas"], WORKERS["maxReplicas"]) == (scaling["min_replicas"], scaling["max_replicas"])
    assert CLUSTER["enableInTreeAutoscaling"] is True
    grace = WORKERS["template"]["spec"]["terminationGracePeriodSeconds"]
    assert grace > of_ingress_seconds(plan)


def of_ingress_seconds(plan):
    from tritonllm.serve.ray.ray_serve import of_ingress

    return of_ingress(plan)["graceful_shutdown_timeout_s"]


def test_the_image_is_that_of_the_manifest():
    (version,) = re.findall(r"'ray\[serve\]==([\d.]+)'", RAY_IMAGE)
    assert version == CLUSTER["rayVersion"]
    (base,) = re.findall(r"^FROM (\S+)$", RAY_IMAGE, re.MULTILINE)
    assert base == RANKS["image"] == "tritonllm:latest"
    assert {container["image"] for container in containers()} == {"tritonllm-ray:latest"}
    assert re.findall(r"^USER (\w+)$", RAY_IMAGE, re.MULTILINE)[-1] == "server"
    for command in re.findall(r"^RUN (.*)$", re.sub(r"\\\n\s*", "", RAY_IMAGE), re.MULTILINE):
        subprocess.run(["sh", "-n", "-c", command], check=True)
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert extras["ray"] == [one for one in extras["dev"] if one.startswith("ray")]
    assert extras["ray"][0].startswith("ray[serve]")


def test_each_pod_has_the_key_and_the_port_is_serves():
    for container in containers():
        (variable,) = container["env"]
        assert variable["name"] == "TRITONLLM_API_KEY"
    assert {"name": "serve", "containerPort": CONFIG["http_options"]["port"]} in containers()[0]["ports"]


def test_parts_of_the_job_fit():
    options = dict(word[2:].split("=") for word in RANKS["command"] if word.startswith("--"))
    name = JOB_PARTS["Job"]["metadata"]["name"]
    assert JOB["completionMode"] == "Indexed" and int(options["nnodes"]) == JOB["completions"] == JOB["parallelism"]
    assert int(options["nproc-per-node"]) == RANKS["resources"]["limits"]["nvidia.com/gpu"]
    (ranks,) = re.findall(r"tensor_parallel_size=(\d+)", JOB_PARTS["ConfigMap"]["data"]["answer.py"])
    assert int(ranks) == int(options["nnodes"]) * int(options["nproc-per-node"])
    service = JOB_PARTS["Service"]
    assert options["master-addr"] == f"{name}-0.{service['metadata']['name']}"
    assert POD["subdomain"] == service["metadata"]["name"] and service["spec"]["clusterIP"] == "None"
    assert service["spec"]["selector"] == {"job-name": name}
    assert {mount["name"] for mount in RANKS["volumeMounts"]} == {volume["name"] for volume in POD["volumes"]}
    (folder,) = (mount["mountPath"] for mount in RANKS["volumeMounts"] if mount["name"] == "script")
    assert RANKS["command"][-1] == f"{folder}/answer.py"
    assert POD["volumes"][0]["configMap"]["name"] == JOB_PARTS["ConfigMap"]["metadata"]["name"]


@pytest.mark.long
def test_the_job_answers(tmp_path, llm, free_port):
    """Its command, once for each pod, here both on this machine."""
    script = JOB_PARTS["ConfigMap"]["data"]["answer.py"].replace("Qwen/Qwen3-0.6B", str(model_path()))
    (tmp_path / "answer.py").write_text(script)
    assert RANKS["command"][0] == "torchrun" and shutil.which("torchrun", path=os.path.dirname(sys.executable))

    def pod(index):
        changes = {
            "torchrun": None,
            "--node-rank=$(JOB_COMPLETION_INDEX)": f"--node-rank={index}",
            "--master-addr=tritonllm-ranks-0.tritonllm-ranks": "--master-addr=127.0.0.1",
            "--master-port=29500": f"--master-port={free_port}",
            "/etc/ranks/answer.py": str(tmp_path / "answer.py"),
        }
        assert changes.keys() <= set(RANKS["command"])
        words = [changes.get(word, word) for word in RANKS["command"][1:]]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        return subprocess.Popen([sys.executable, "-m", "torch.distributed.run", *words], env=environment(), **pipes)

    pods = [pod(index) for index in range(JOB["completions"])]
    (first, errors), (second, _) = (one.communicate(timeout=PATIENCE) for one in pods)
    assert [one.returncode for one in pods] == [0, 0], errors
    prompts = re.findall(r'"([^"]+)"', re.findall(r"PROMPTS = \[(.*)\]", script)[0])
    expected = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=64), use_tqdm=False)
    assert first.splitlines() == [f"{one.prompt!r} {one.outputs[0].text!r}" for one in expected]
    assert not second
