# The image of docker/Dockerfile with Ray Serve, for deploy/kubernetes-ray.yaml:
#
#   docker build -f docker/Dockerfile -t tritonllm . && docker build -f docker/ray.Dockerfile -t tritonllm-ray docker
FROM tritonllm:latest

USER root
# KubeRay's probes ask with wget.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends wget \
    && rm -rf /var/lib/apt/lists/*
# The version is that of rayVersion in the manifest.
RUN pip install --no-cache-dir 'ray[serve]==2.60.0'

USER server
# KubeRay says what runs, and looks after it.
ENTRYPOINT []
HEALTHCHECK NONE
