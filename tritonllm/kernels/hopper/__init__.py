"""Gluon pieces that several operations share on Hopper."""

from tritonllm.kernels.runtime.releases import keep_gluon_names

keep_gluon_names()  # every kernel in dense/sm90 and moe/sm90 imports from here
