"""What is said to a process that a cluster of Ray does not let in."""

import pytest

from tritonllm.dist import ray_cluster

ray = pytest.importorskip("ray")


@pytest.mark.parametrize(
    ("error", "kind", "says"),
    [
        (
            ray.exceptions.AuthenticationError("no token was found"),
            ValueError,
            "^--ray finds no token of Ray, .*RAY_AUTH_TOKEN",
        ),
        (
            ConnectionError("Failed to connect to Ray cluster at 10.0.0.1:6379"),
            ConnectionError,
            "^--ray: Failed .*RAY_AUTH_TOKEN",
        ),
    ],
)
def test_who_has_not_the_clusters_token_is_told_where_it_belongs(error, kind, says, monkeypatch):
    def refuse(**options):
        raise error

    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", refuse)
    with pytest.raises(kind, match=says):
        ray_cluster.join_cluster("--ray")
